"""What a server's environment is made of: every distribution with version and hash, and what was changed by hand.

The interpreter that runs the server is asked by a small script that uses the standard library only: nothing of SGLang or
torch is imported, so the inventory takes a second and works where the stack itself is broken.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lib.errors import BadInput, WorkbookError
from lib.hosts import local
from lib.model.memory import kv_bytes_per_token
from lib.records import OUTCOMES, Measured, Prediction, Status, Verdict
from lib.results import NotebookRun, ServerHandle, Stamp
from lib.server.answers import Answer, ask, read_answer
from lib.server.launch import LaunchRecord
from lib.server.log_records import Fact, KvPool
from lib.server.spec import resolve_python
from lib.server.sweep import failed_launch

GIB = 1 << 30
#: A log line whose rounding is coarser than this share of a prediction can neither confirm nor refute it.
COARSEST = 0.1

#: Distributions whose files are compared with their RECORD: a local patch shows as a changed file.
CHECKED = ("sglang", "sgl-kernel", "sglang-kernel", "flashinfer-python", "torch", "transformers")

_SCRIPT = r"""
import base64, hashlib, importlib.metadata as m, json, os, platform, sys
checked = set(json.loads(sys.argv[1]))
rows, seen, bundles = [], set(), {}
def carried_by(d):
    try:
        return set(json.load(open(d.locate_file("bundle.json"), encoding="utf-8"))["files"])
    except (OSError, ValueError, KeyError):
        return None
for d in m.distributions():
    name = d.metadata["Name"]
    if not name or name.lower() in seen:
        continue
    seen.add(name.lower())
    record = d.read_text("RECORD") or ""
    row = {"name": name, "version": d.version, "record_sha256": hashlib.sha256(record.encode()).hexdigest() if record else None,
           "direct_url": d.read_text("direct_url.json")}
    if name.lower().replace("_", "-") in checked and record:
        changed, missing, large, same, left = [], [], [], 0, 0
        carried = bundles.setdefault(str(d.locate_file("")), carried_by(d))
        for f in d.files or []:
            if f.hash is None or not str(f).endswith((".py", ".json", ".txt", ".so", ".cu", ".cuh", ".h")):
                continue
            p = f.locate()
            try:
                if os.path.getsize(p) > 500_000_000:
                    large.append(str(f))
                    continue
                h = hashlib.new(f.hash.mode)
                with open(p, "rb") as file:
                    for block in iter(lambda: file.read(1 << 20), b""):
                        h.update(block)
                h = h.digest()
                if base64.urlsafe_b64encode(h).rstrip(b"=").decode() != f.hash.value:
                    changed.append(str(f))
                else:
                    same += 1
            except OSError:
                if carried is not None and str(f) not in carried:
                    left += 1
                else:
                    missing.append(str(f))
        row["files"] = {"same": same, "changed": changed[:50], "missing": missing[:50],
                        "n_changed": len(changed), "n_missing": len(missing), "large": large, "left_out": left}
    rows.append(row)
torch = {}
try:
    d = m.distribution("torch")
    text = open(d.locate_file("torch/version.py")).read()
    scope = {}
    exec(compile(text, "torch/version.py", "exec"), scope)
    torch = {k: scope.get(k) for k in ("__version__", "cuda", "hip", "git_version")}
    torch["__version__"] = str(torch["__version__"])
except Exception as e:
    torch = {"error": f"{type(e).__name__}: {e}"}
print(json.dumps({"python": platform.python_version(), "executable": sys.executable, "distributions": rows, "torch": torch}))
"""


def take_inventory(folder: Path, python: str) -> None:
    """Writes inventory.json: distributions, torch and CUDA, this machine.

    Args:
        folder: where it goes.
        python: the interpreter that runs the server.

    Raises:
        BadInput: that interpreter doesn't run, or says nothing.
    """
    out = subprocess.run(
        [python, "-c", _SCRIPT, json.dumps(CHECKED)], capture_output=True, text=True, timeout=300, check=False
    )
    if out.returncode:
        raise BadInput(
            f"{python} lists its packages",
            (out.stderr.strip().splitlines() or ["no output"])[-1],
            "name the Python of your SGLang environment in server.python",
        )
    inventory = json.loads(out.stdout)
    inventory["host"] = local.describe()
    local.write_atomic(folder / "inventory.json", json.dumps(inventory, indent=1))


def manifest_sha256(inventory: Mapping[str, Any]) -> str:
    """One hash for a whole environment: names, versions and RECORD hashes, order not counted."""
    rows = sorted((d["name"].lower(), d["version"], d["record_sha256"] or "") for d in inventory["distributions"])
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


def stack_rows(inventory: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows that matter first: what the server is, torch, CUDA or the reason why none, the machine."""
    if not inventory["distributions"]:
        return [{"what": "the server's environment", "value": "not read", "detail": inventory.get("reason", "")}]
    versions = {d["name"].lower().replace("_", "-"): d for d in inventory["distributions"]}
    torch, host = inventory["torch"], inventory["host"]
    rows = [{"what": "Python", "value": inventory["python"], "detail": ""}]
    for name in ("sglang", "sgl-kernel", "sglang-kernel", "flashinfer-python", "transformers", "triton"):
        found = versions.get(name)
        rows.append({"what": name, "value": found["version"] if found else "not installed", "detail": _origin(found)})
    cuda = torch.get("cuda") or torch.get("hip")
    version = torch.get("__version__") or "not read"
    why_not = torch.get("error") or "this torch is built for the CPU alone"
    rows.append({"what": "torch", "value": version, "detail": f"git {str(torch.get('git_version') or 'unknown')[:12]}"})
    rows.append({"what": "CUDA / HIP", "value": cuda or "none", "detail": "" if cuda else why_not})
    gpus = ", ".join(f"{g['name']} ({g['memory_total_mib']:.0f} MiB)" for g in host["gpus"])
    rows.append({"what": "GPUs", "value": len(host["gpus"]), "detail": gpus or host["gpus_reason"]})
    driver = {g["driver_version"] for g in host["gpus"]}
    rows.append(
        {
            "what": "driver",
            "value": ", ".join(sorted(driver)) or "none",
            "detail": "" if driver else host["gpus_reason"],
        }
    )
    rows.append(
        {"what": "CPU", "value": host["cpu"], "detail": f"{host['cpu_cores']} cores; {', '.join(host['cpu_features'])}"}
    )
    return rows


def _origin(found: Mapping[str, Any] | None) -> str:
    if not found or not found.get("direct_url"):
        return ""
    url = json.loads(found["direct_url"])
    commit = (url.get("vcs_info") or {}).get("commit_id")
    return f"commit {commit}" if commit else "installed from a local folder or file"


def changed_files(inventory: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Checked distributions: files that equal their RECORD, differ, miss, or are too large to hash; and local builds.

    A wheel built locally from patched source carries a RECORD that fits it: where it was installed from tells it apart. What
    an offline bundle left out (its bundle.json lists what it carries) is counted apart: it is neither changed nor lost.
    """
    return [
        {
            "name": d["name"],
            "version": d["version"],
            "from": _origin(d) or "a package index",
            "same": d["files"]["same"],
            "changed": d["files"]["n_changed"],
            "missing": d["files"]["n_missing"],
            "left out by the bundle": d["files"].get("left_out", 0),
            "not hashed": len(d["files"]["large"]),
            "which": ", ".join((d["files"]["changed"] + d["files"]["missing"] + d["files"]["large"])[:5]),
        }
        for d in inventory["distributions"]
        if d.get("files")
    ]


# notebook 01 ------------------------------------------------------------------------------------------------------------


def inventory_of(run: NotebookRun, server: ServerHandle) -> dict[str, Any]:
    """The environment behind the server (raw record `inventory`); for an attached server, why it isn't read."""
    if server.attached:
        run.skip(
            "the inventory of the server's environment",
            "the server is attached, not launched from an environment named here",
        )
        return {"reason": "attached server", "distributions": [], "torch": {}, "python": "", "host": run.host()}
    python = None if run.offline else str(resolve_python(server.params.python))
    packages = (
        None
        if python is None
        else [str(f.stat().st_mtime_ns) for f in Path(python).parents[1].glob("lib/python*/site-packages")]
    )
    return dict(run.measure("inventory", None, take_inventory, context=packages, python=python).json("inventory.json"))


def distribution_rows(inventory: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every distribution with the hash of its RECORD."""
    rows = sorted(inventory["distributions"], key=lambda d: d["name"].lower())
    return [{"name": d["name"], "version": d["version"], "RECORD": (d["record_sha256"] or "none")[:16]} for d in rows]


def predictions(run: NotebookRun, server: ServerHandle, launch: LaunchRecord | None = None) -> list[Prediction]:
    """From the checkpoint's files alone: weights in memory, bytes of KV cache a token, tokens in the pool."""
    checkpoint = run.checkpoint(server)
    log = run.log(launch) if launch else None
    if checkpoint is None:
        return []
    made = []
    tp = server.tp_size
    weights = checkpoint.weight_bytes
    loaded = log.weights[0].gib if log and log.weights else None
    made.append(
        Prediction(
            id="weights",
            what="memory that the weights take on one device",
            formula="bytes in the safetensors headers / tp",
            predicted=_known(weights / tp if weights else None, "B", "no safetensors headers"),
            source="lib.model.checkpoint",
            measured=_known(
                loaded * GIB if loaded is not None else None,
                "B",
                "no 'Load weight end' line",
                "the log rounds to 0.01 GB",
            ),
        )
    )
    try:
        kv = kv_bytes_per_token(
            checkpoint,
            tp,
            str(server.params.flags.get("kv_cache_dtype") or "auto"),
            sglang_version=run.version(server),
            platform=run.platform(server),
        )
        predicted = _known(kv.per_gpu, "B", "")
    except WorkbookError as error:
        predicted = Measured(value=None, reason=str(error))
    pool = next((p for p in log.kv_pools if p.role == "target"), None) if log else None
    made.append(
        Prediction(
            id="kv-bytes-per-token",
            what="KV cache bytes a token and device",
            predicted=predicted,
            formula="layers x 2 x KV heads per device x head_dim x element size",
            source="lib.model.memory.kv_bytes_per_token",
            measured=pool_bytes_per_token(pool),
        )
    )
    return made


def pool_bytes_per_token(pool: KvPool | None) -> Measured:
    """Bytes a token as the log's K and V sizes give them, with the interval that their rounding to 0.01 GB leaves."""
    if pool is None:
        return Measured(value=None, reason="no KV pool line in the log")
    if pool.kv_gib is None or pool.tokens <= 0 or pool.bytes_per_token_low is None:
        return Measured(value=None, reason="the pool line carries no usable sizes")
    value = pool.kv_gib * GIB / pool.tokens
    return Measured(
        value=value,
        unit="B",
        n=1,
        low=pool.bytes_per_token_low,
        high=pool.bytes_per_token_high,
        reason="rounding of the log line",
    )


def _known(value: float | int | None, unit: str, why_not: str, note: str = "read once") -> Measured:
    return Measured(
        value=value, unit=unit, n=1 if value is not None else None, reason=why_not if value is None else note
    )


def loaded_rows(run: NotebookRun, launch: LaunchRecord) -> list[dict[str, Any]]:
    """What the server says that it loaded, each with the line of its log."""
    log, file = run.log(launch), run.log_file(launch)
    rows = [{"what": "launch", "value": launch.launch_id, "evidence": run.evidence(file.parent / "launch.json")}]
    rows.append({"what": "state", "value": launch.state, "evidence": run.evidence(file.parent / "launch.json")})
    if launch.exit_code is not None and launch.ready_s is None:
        rows.append(
            {"what": "exit code", "value": launch.exit_code, "evidence": run.evidence(file.parent / "launch.json")}
        )
    for weights in log.weights if log else []:
        rows.append(_line(run, file, f"weights ({weights.role})", f"{weights.model_class}, {weights.gib} GiB", weights))
    for pool in log.kv_pools if log else []:
        rows.append(
            _line(run, file, f"KV pool ({pool.role})", f"{pool.dtype}, {pool.tokens} tokens, {pool.kv_gib} GiB", pool)
        )
    if log and log.capacity:
        rows.append(_line(run, file, "context", f"{log.capacity.context_len} tokens", log.capacity))
    if log and log.ready:
        rows.append(_line(run, file, "ready", f"{launch.ready_s} s after launch", log.ready))
    return rows


def _line(run: NotebookRun, file: Path, what: str, value: Any, fact: Fact) -> dict[str, Any]:
    return {"what": what, "value": value, "evidence": run.evidence(file, fact.line_no, fact.line)}


def known_answer(run: NotebookRun, server: ServerHandle, launch: LaunchRecord) -> Answer | None:
    """Asks the profile's known prompt; None if the server never became ready."""
    if launch.ready_s is None and launch.state != "attached":
        return None
    known = run.profile.known_answer
    asked = run.measure(
        "answer", server, ask, keep_errors=True, prompt=known.prompt, max_new_tokens=known.max_new_tokens
    )
    return read_answer(asked.json("answer.json"), known.expect) if asked.ok else None


def answer_rows(run: NotebookRun, answer: Answer | None) -> list[dict[str, Any]]:
    """The prompt, what came, what was expected."""
    known = run.profile.known_answer
    if answer is None:
        return [
            {"prompt": known.prompt, "answer": "(none)", "expected": known.expect or "(anything)", "degenerate": ""}
        ]
    return [
        {
            "prompt": known.prompt,
            "answer": repr(answer.text),
            "expected": repr(known.expect),
            "degenerate": answer.degenerate or "no",
        }
    ]


def stop_rows(server: ServerHandle) -> list[dict[str, Any]]:
    """How the server ended and what shows that it is gone."""
    record = server.launches()[-1]
    if record.stop is None:
        return [{"what": "stopped", "value": "no: it is attached, or ended by itself"}]
    proof = record.stop
    return [
        {"what": "signals", "value": ", ".join(proof.signals) or "none: it had ended by itself"},
        {"what": "seconds until gone", "value": proof.seconds},
        {"what": "processes left", "value": len(proof.processes_left)},
        {"what": "port free", "value": proof.port_free},
        {"what": "GPU memory", "value": proof.gpu_memory},
    ]


def verdicts(
    run: NotebookRun,
    inventory: Mapping[str, Any],
    server: ServerHandle,
    launch: LaunchRecord,
    answer: Answer | None,
    predicted: Sequence[Prediction],
) -> list[Verdict]:
    """Is the stack what its wheels say, does it load, does it give a known answer, were the predictions right?"""
    file = run.log_file(launch)
    made = []
    if inventory["distributions"]:
        made.append(_unmodified(run, inventory))
    made.append(_loads(run, launch))
    if answer is not None or launch.ready_s is not None:
        made.append(_answers(run, server, launch, answer))
    for prediction in predicted:
        made.append(_predicted(run, server, launch, prediction, file))
    if launch.state != "attached" and launch.ready_s is not None:
        record = server.launches()[-1]
        proof = record.stop
        made.append(
            Verdict(
                id="gone",
                claim="The server is gone after its stop: processes, port and GPU memory",
                status=Status.PASS if proof and proof.gone else Status.FAIL,
                rule="lib.server.launch",
                limit="nothing left",
                reason=f"{proof.signals} in {proof.seconds} s; GPU: {proof.gpu_memory}"
                if proof
                else "it was not stopped",
                evidence=[run.evidence(file.parent / "launch.json")],
                launch_ids=[launch.launch_id],
            )
        )
    return made


def _unmodified(run: NotebookRun, inventory: Mapping[str, Any]) -> Verdict:
    checked = changed_files(inventory)
    changed = {row["name"]: row["changed"] + row["missing"] for row in checked if row["changed"] + row["missing"]}
    own = {row["name"]: row["from"] for row in checked if row["from"] != "a package index"}
    skipped = sum(row["not hashed"] for row in checked)
    names = ", ".join(f"{row['name']} {row['version']} ({row['same']} files)" for row in checked)
    parts = [f"differing files: {changed}"] if changed else []
    parts += [f"not from a package index: {own}"] if own else []
    parts += [f"{skipped} files too large to hash"] if skipped else []
    left = sum(row["left out by the bundle"] for row in checked)
    status = Status.FAIL if changed or own else Status.INCONCLUSIVE if skipped or not checked else Status.PASS
    total = sum(row["same"] for row in checked) + sum(changed.values())
    return Verdict(
        id="unmodified",
        claim="The serving packages are as published: from a package index, and no installed file differs from its wheel's RECORD",
        status=status,
        rule="lib.deploy.build",
        limit="0 files, 0 local builds",
        reason=("; ".join(parts) or f"equal: {names or 'nothing was checked'}")
        + (f"; {left} files were left out by the offline bundle" if left else ""),
        measured=Measured(value=sum(changed.values()), unit="files", n=total, reason="counted"),
        evidence=[
            run.evidence(run.raw / "inventory" / "inventory.json", note=f"manifest {manifest_sha256(inventory)[:12]}")
        ],
    )


def _loads(run: NotebookRun, launch: LaunchRecord) -> Verdict:
    file = run.log_file(launch)
    common: dict[str, Any] = {
        "id": "loads",
        "claim": "The server loads the model and becomes ready",
        "rule": "lib.server.launch",
        "limit": f"ready within {run.profile.server.ready_timeout_s:.0f} s",
        "launch_ids": [launch.launch_id],
    }
    if launch.state == "attached":
        return Verdict(
            status=Status.PASS,
            reason="it answers; it was attached, its start was not seen",
            evidence=[run.evidence(file.parent / "server_info.json")],
            **common,
        )
    measured = Measured(
        value=launch.ready_s,
        unit="s",
        n=1 if launch.ready_s else None,
        reason="one launch" if launch.ready_s else launch.state,
    )
    if launch.ready_s is not None:
        log = run.log(launch)
        ready = log.ready if log else None
        return Verdict(
            status=Status.PASS,
            measured=measured,
            reason=f"ready after {launch.ready_s} s",
            evidence=[run.evidence(file, ready.line_no if ready else None, ready.line if ready else None)],
            **common,
        )
    outcome, reason, evidence = failed_launch(run, launch)
    return Verdict(status=OUTCOMES[outcome], measured=measured, reason=reason, evidence=[evidence], **common)


def _answers(run: NotebookRun, server: ServerHandle, launch: LaunchRecord, answer: Answer | None) -> Verdict:
    file = run.raw / "answer" / "answer.json"
    common: dict[str, Any] = {
        "id": "known-answer",
        "claim": "It gives the known answer, greedily decoded",
        "rule": "lib.server.answers",
        "limit": f"begins with {run.profile.known_answer.expect!r}",
        "launch_ids": [launch.launch_id],
    }
    if answer is None:
        return no_answer(run, common)
    evidence = [run.evidence(file, quote=answer.text[:80])]
    if answer.degenerate:
        return Verdict(status=Status.FAIL, reason=f"degenerate: {answer.degenerate}", evidence=evidence, **common)
    if answer.correct is None:
        return Verdict(
            status=Status.INCONCLUSIVE,
            reason="nothing is expected of this model; its output is not degenerate",
            evidence=evidence,
            **common,
        )
    status = Status.PASS if answer.correct else Status.FAIL
    return Verdict(status=status, reason=f"it says {answer.text[:40]!r}", evidence=evidence, **common)


def no_answer(run: NotebookRun, common: Mapping[str, Any]) -> Verdict:
    """The verdict on an answer that could not be taken: from the stamp of its request."""
    file = run.raw / "answer" / "stamp.json"
    if not file.exists():
        return Verdict(status=Status.INCONCLUSIVE, reason="it was never asked: no server came up", **common)
    stamp = Stamp.model_validate_json(file.read_text())
    if stamp.invalid:
        return Verdict(status=Status.INVALID, reason=stamp.invalid, **common)
    return Verdict(status=Status.FAIL, reason=stamp.error or "no answer", evidence=[run.evidence(file)], **common)


def _predicted(
    run: NotebookRun, server: ServerHandle, launch: LaunchRecord, prediction: Prediction, file: Path
) -> Verdict:
    common: dict[str, Any] = {
        "id": f"predicted-{prediction.id}",
        "claim": f"Predicted before the launch: {prediction.what}",
        "rule": prediction.source,
        "predicted": prediction.predicted,
        "measured": prediction.measured,
        "limit": "within 2%, or within the rounding of the log",
        "launch_ids": [launch.launch_id],
    }
    predicted, measured = prediction.predicted.value, prediction.measured.value if prediction.measured else None
    if not isinstance(predicted, (int, float)) or not isinstance(measured, (int, float)):
        reason = (
            prediction.predicted.reason
            if predicted is None
            else (prediction.measured.reason if prediction.measured else "not measured")
        )
        return Verdict(status=Status.INCONCLUSIVE, reason=reason or "unknown", **common)
    if prediction.id == "weights" and run.platform(server) == "cpu":
        reason = "the log's 'mem usage' is a difference of the machine's free memory, which other processes move"
        return Verdict(status=Status.INCONCLUSIVE, reason=reason, **common)
    low, high = measured * 0.98, measured * 1.02
    if prediction.measured and prediction.measured.low is not None and prediction.measured.high is not None:
        low, high = min(low, prediction.measured.low), max(high, prediction.measured.high)
    if prediction.id == "weights":  # printed to 0.01 GB, and measured as a difference of free memory
        low, high = min(low, measured - 0.01 * GIB), max(high, measured + 0.01 * GIB)
    if (high - low) / 2 > COARSEST * predicted:
        reason = f"the log's rounding leaves {low:.4g} to {high:.4g} {prediction.predicted.unit}: too coarse for this small model"
        return Verdict(status=Status.INCONCLUSIVE, reason=reason, **common)
    status = Status.PASS if low <= predicted <= high else Status.FAIL
    return Verdict(
        status=status,
        reason=f"measured / predicted = {measured / predicted:.4f}",
        evidence=[run.evidence(file)],
        **common,
    )


def recommendation(made: Sequence[Verdict]) -> str:
    """One sentence: go on, or what to settle first."""
    bad = [v.id for v in made if v.status in (Status.FAIL, Status.ERROR, Status.INVALID, Status.UNSUPPORTED)]
    return f"Settle first: {', '.join(bad)}." if bad else "This stack loads the model and answers: go on to the sweep."
