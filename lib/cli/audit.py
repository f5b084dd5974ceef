"""`workbook audit`: is anything lowering this deployment's accuracy? Reads whatever is given; starts nothing."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lib.audit.evidence import (
    ALIASES,
    check_argument,
    checkpoint_facts,
    environ_facts,
    fetch_server,
    flags_facts,
    gather,
    gpu_fact,
    json_object,
    log_file_facts,
    metrics_facts,
    server_info_facts,
    ssm_dtype_facts,
    version_fact,
)
from lib.audit.facts import Fact
from lib.audit.fidelity import ProbeReport, judge_probe, take_probe
from lib.audit.rules import AuditReport, FixAudit, audit, audit_of_fix, changeable
from lib.cli._input import require_standard_input
from lib.errors import BadInput, ServerError, UnreadableFile
from lib.findings import LEVELS
from lib.params import ServerParams
from lib.server.attach import AttachedServer
from lib.server.redact import redact_object, redact_text

EPILOG = """\
What could not be checked names the evidence that would settle it. --change audits the deployment as it would be after a
change (repeat it for several): --change kv_cache_dtype=bfloat16 --change sglang_version=0.5.20.
--probe sends a few requests to --base-url and measures what reading its KV cache costs (docs/audit-probe.md): one at a
time, no flush, no restart; a fault counts as an error.
A key for --base-url is taken from WORKBOOK_API_KEY. Exit codes: 0 read, 1 a finding at or above --fail-on, 2 bad input.
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `workbook audit`."""
    parser = subparsers.add_parser(
        "audit",
        help="is anything lowering accuracy? from a checkpoint, a log, a server or its flags",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--checkpoint", metavar="DIR", help="folder with config.json and safetensors (headers are read)"
    )
    parser.add_argument("--log", metavar="FILE", help="server log; - reads standard input")
    parser.add_argument("--server-info", metavar="FILE", help="the answer of GET /server_info; - reads standard input")
    parser.add_argument("--metrics", metavar="FILE", help="the answer of GET /metrics; - reads standard input")
    parser.add_argument("--base-url", metavar="URL", help="a running server: its answers are fetched")
    parser.add_argument("--flags", metavar="LINE", help="the launch line, with its environment assignments")
    parser.add_argument("--environ", metavar="FILE", help="a copy of /proc/PID/environ of the server")
    parser.add_argument("--sglang-version", metavar="V", help="when no other input says it")
    parser.add_argument("--gpu", metavar="NAME", help="GPU or compute capability, e.g. 'RTX PRO 6000' or 12.0")
    parser.add_argument("--output", metavar="FILE", help="text that the server produced, to look for garbage")
    parser.add_argument(
        "--change", metavar="NAME=VALUE", action="append", default=[], help="audit it as it would be after this change"
    )
    parser.add_argument("--probe", action="store_true", help="measure what reading the KV cache costs on --base-url")
    parser.add_argument("--probe-documents", metavar="N", type=int, default=4, help="texts of the probe, 1 to 32 (4)")
    parser.add_argument(
        "--probe-limit",
        metavar="NATS",
        type=float,
        default=0.05,
        help="accepted cost of the cache, nats a token (0.05)",
    )
    parser.add_argument(
        "--probe-duty", metavar="F", type=float, default=0.5, help="largest busy share of the time (0.5)"
    )
    parser.add_argument("--probe-out", metavar="DIR", help="keep the probe's raw answers (probe.json) in this folder")
    parser.add_argument("--json", action="store_true", help="one object on stdout (docs/audit.md)")
    parser.add_argument(
        "--fail-on", choices=LEVELS, metavar="LEVEL", help=f"exit 1 on a finding at or above {', '.join(LEVELS)}"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """0 read; 1 a finding at or above --fail-on; unreadable input raises (exit code 2)."""
    if args.probe and not args.base_url:
        raise BadInput("expected --base-url URL with --probe", "no server to probe", "name the running server")
    if not 1 <= args.probe_documents <= 32 or not args.probe_limit > 0 or not 0 < args.probe_duty <= 1:
        found = f"{args.probe_documents}, {args.probe_limit}, {args.probe_duty}"
        raise BadInput("expected 1 to 32 --probe-documents, --probe-limit > 0, --probe-duty in (0, 1]", found)
    # Before anything is shortened or quoted: half a secret that was cut is no shape that could be recognised any more.
    facts = redact_object(gather(*_groups(args)))
    probe = _probe(args) if args.probe else None
    more = {"probe": probe.model_dump(mode="json")} if probe else {}
    if args.change:
        fix = redact_object(audit_of_fix(facts, redact_object(_changes(args.change))))
        report = fix.report
        print(json.dumps({**fix.model_dump(mode="json"), **more}, ensure_ascii=False) if args.json else _fix_text(fix))
    else:
        report = redact_object(audit(facts))
        print(
            json.dumps({**report.model_dump(mode="json"), **more}, ensure_ascii=False)
            if args.json
            else report_text(report)
        )
    if probe and not args.json:
        print(probe_text(probe))
    if probe and probe.outcome == "fault" and args.fail_on:
        return 1
    reached = args.fail_on and any(LEVELS.index(item.level) >= LEVELS.index(args.fail_on) for item in report.findings)
    return 1 if reached else 0


def _probe(args: argparse.Namespace) -> ProbeReport:
    """Probes the server at --base-url; its raw answers go to --probe-out, or nowhere."""
    key = "WORKBOOK_API_KEY" if os.environ.get("WORKBOOK_API_KEY") else None
    with contextlib.ExitStack() as stack:
        folder = Path(args.probe_out or stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        server = AttachedServer.attach(
            "probed", ServerParams(attach=args.base_url, api_key_env=key), folder / "servers"
        )
        take_probe(server, folder, args.probe_documents, duty=args.probe_duty)
        return judge_probe(json.loads((folder / "probe.json").read_text()), args.probe_limit)


def probe_text(probe: ProbeReport) -> str:
    """The readable form of a probe: the answer, its two contrasts, floors, sizes and rates."""
    out = ["", f"PROBE: {probe.outcome}. {probe.answer}"]
    for part in (probe.prefix, probe.decode):
        if part:
            found = f"; a cost of {part.detectable:.4f} would be found 9 times in 10" if part.detectable else ""
            need = f"; about {part.needed_tokens:,} tokens are needed" if part.needed_tokens else ""
            out.append(f"  {part.outcome}: {part.what}: {part.reason}{found}{need}")
    if probe.floor_hit is not None:
        fresh = f"{probe.floor_fresh:.5f}" if probe.floor_fresh is not None else "not measured"
        out.append(f"  noise, mean |difference|: fresh twice {fresh}, hit twice {probe.floor_hit:.5f} nat/token")
    out.append(
        f"  KV cache {probe.kv_cache_dtype}, backend {probe.plan.backend}; {probe.requests} requests, {probe.tokens_sent:,} tokens, "
        f"{probe.seconds:.1f} s; a sound server is called faulty in at most {probe.false_alarm_rate:.1%} of probes"
    )
    return "\n".join([*out, *(f"  note: {n}" for n in probe.notes)])


def _groups(args: argparse.Namespace) -> list[list[Fact]]:
    inputs = ("checkpoint", "log", "server_info", "metrics", "base_url", "flags", "environ", "output")
    given = [name for name in inputs if getattr(args, name) is not None]
    if not given:
        ways = ", ".join("--" + name.replace("_", "-") for name in inputs)
        raise BadInput("expected something to audit", "no input", f"give at least one of {ways}")
    if [getattr(args, name) for name in given].count("-") > 1:
        raise BadInput("expected standard input for one option", "several are -", "give files for the others")
    readers: dict[str, Callable[[], list[Fact]]] = {
        "checkpoint": lambda: checkpoint_facts(Path(args.checkpoint)),
        "log": lambda: log_file_facts(_path(args.log)),
        "server_info": lambda: server_info_facts(json_object(_path(args.server_info)), _name(args.server_info)),
        "metrics": lambda: metrics_facts(_text(args.metrics), _name(args.metrics)),
        "base_url": lambda: _server(args.base_url),
        "flags": lambda: _flags(args.flags),
        "environ": lambda: environ_facts(_text(args.environ), _name(args.environ)),
        "output": lambda: [_output(args.output)],
    }
    groups = [readers[name]() for name in given]
    if not any(_tells(fact) for group in groups for fact in group):
        names = ", ".join("--" + name.replace("_", "-") for name in given)
        raise BadInput(
            "expected an input that says something about a deployment",
            f"nothing that a rule asks for in {names}",
            "give a launch line with flags of SGLang, its log, or the checkpoint's folder",
        )
    if args.sglang_version:
        groups.append([version_fact(args.sglang_version)])
    if args.gpu:
        groups.append([gpu_fact(args.gpu)])
    if args.log and args.checkpoint:
        groups.append(ssm_dtype_facts(gather(*groups)))
    return groups


def _server(url: str) -> list[Fact]:
    """What a running server says; one that doesn't answer is an input that can't be read, like a missing file."""
    try:
        return fetch_server(url, api_key=os.environ.get("WORKBOOK_API_KEY"))
    except ServerError as error:
        raise UnreadableFile(error.expected, error.found, error.do) from error


def _tells(fact: Fact) -> bool:
    """Whether a fact says anything: an empty text or a part of an environment without a known variable does not."""
    if fact.name == "output_text":
        return bool(fact.value.strip())
    return fact.name != "environment" or bool(fact.value["variables"] or fact.value["complete"])


def _flags(line: str) -> list[Fact]:
    facts = flags_facts(line)
    for fact in facts:
        check_argument(fact.name, fact.value)
    return facts


def _output(name: str) -> Fact:
    return Fact(name="output_text", value=_text(name), how="read", source="output", evidence=[])


def _path(name: str) -> Path | None:
    if name == "-":
        require_standard_input("text to audit")
        return None
    return Path(name)


def _name(name: str) -> str:
    return "standard input" if name == "-" else Path(name).name


def _text(name: str) -> str:
    if name == "-":
        require_standard_input("text to audit")
        return sys.stdin.read()
    try:
        return Path(name).read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UnreadableFile(f"expected a readable file at {name}", error.strerror or str(error)) from error


#: Facts whose value is an object.
_OBJECTS = ("kv_scales", "kv_declared", "weight_quant", "environment", "rope")


def _changes(pairs: list[str]) -> dict[str, Any]:
    change: dict[str, Any] = {}
    for pair in pairs:
        name, sign, value = pair.partition("=")
        name = name.strip().lstrip("-").replace("-", "_")
        name = ALIASES.get(name, name)
        if not sign or name not in changeable():
            raise BadInput(
                "expected --change NAME=VALUE with a fact that can be chosen", pair, f"one of {', '.join(changeable())}"
            )
        try:
            change[name] = json.loads(value)
        except ValueError:
            change[name] = value
        if name == "sglang_version":
            change[name] = version_fact(value).value
        check_argument(name, change[name])
        if name in _OBJECTS and not isinstance(change[name], dict):
            raise BadInput(f"expected --change {name}= with a JSON object", redact_text(value)[:60])
        if name == "kv_scales":
            change[name] = {"present": True, "count": None, "all_one": None, **change[name]}
    return change


_MARK = {"error": "ERROR  ", "warning": "WARNING", "info": "info   "}


def report_text(report: AuditReport) -> str:
    """The readable form: findings first, then accepted losses, what is fine, and what could not be checked."""
    out = [report.answer]
    if report.findings:
        out += ["", "FINDINGS"]
    for item in report.findings:
        out.append(f"  {_MARK[item.level]} {item.id}: {item.title} [{item.severity}; {item.certainty}]")
        out.append(f"          {item.what}")
        out.append(f"          effect: {item.effect}; silent: {item.silent}")
        out.append(f"          do: {item.do}")
        for fix in item.fixes:
            words = ", ".join(f"{name}={_value(value)}" for name, value in fix.change.items())
            tail = f" brings {', '.join(fix.introduces)}" if fix.introduces else ""
            tail += f" open: {', '.join(fix.not_checked)}" if fix.not_checked else ""
            out.append(
                f"          audited change: {words} -> {fix.verdict.replace('_', ' ')}{';' if tail else ''}{tail}"
            )
        for place in item.evidence[:4]:
            where = place.path + (f":{place.line}" if place.line else "")
            out.append(f"          seen: {where}  {(place.quote or place.note or '')[:140]}")
        out.append(f"          source: {item.source}")
    if report.accepted_losses:
        out += ["", "ACCEPTED WITH THE CHECKPOINT"]
        out += [f"  {item.id}: {item.what}; instead: {item.instead}" for item in report.accepted_losses]
    if report.fine:
        out += ["", "CHECKED AND FINE"]
        out += [f"  {item.id:4} {item.why} [{item.certainty}]" for item in report.fine]
    if report.not_checked:
        out += ["", "NOT CHECKED, and what would settle it"]
        for gap in report.not_checked:
            out.append(f"  {gap.id:4} {gap.title} [{gap.severity}]: {gap.why}")
            out.append(f"       needs: {'; '.join(gap.settled_by)}")
    if report.not_applicable:
        out += ["", "NOT APPLICABLE: " + ", ".join(f"{item.id} ({item.why})" for item in report.not_applicable)]
    return "\n".join(out)


def _fix_text(fix: FixAudit) -> str:
    words = ", ".join(f"{name}={_value(value)}" for name, value in fix.change.items())
    out = [f"After {words}: {fix.verdict.replace('_', ' ')}{f': {fix.why}' if fix.why else ''}."]
    out += [f"  solves: {', '.join(fix.removed) or 'nothing'}", f"  keeps: {', '.join(fix.kept) or 'nothing'}"]
    out += [f"  BRINGS {item.id} ({item.level}): {item.what}" for item in fix.introduced]
    out += [f"  open {gap.id}: {gap.why}; needs {'; '.join(gap.settled_by)}" for gap in fix.not_checked]
    return "\n".join([*out, "", "THE AUDIT AFTER THE CHANGE", report_text(fix.report)])


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return "no scale tensors" if value.get("present") is False else json.dumps(value)
    return str(value)
