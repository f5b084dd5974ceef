"""One function for each reader of foreign input: bytes in; whatever they are, it returns or raises a WorkbookError."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path

from lib.audit.evidence import environ_facts, flags_facts, gather, log_facts, metrics_facts, server_info_facts
from lib.audit.rules import audit
from lib.cli._inspect_log import report
from lib.deploy.unit import read_journal, read_unit, split_bundle
from lib.errors import WorkbookError
from lib.load.benchfiles import read_bench
from lib.model.checkpoint import checkpoint_from_configs, read_checkpoint
from lib.model.summary import checkpoint_summary
from lib.server.failures import classify
from lib.server.garbage import output_hints, output_signs
from lib.server.log import read_log
from lib.server.observations import classify_events, classify_speeds, garbage_signal
from lib.server.redact import redact_text


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def log(data: bytes) -> None:
    """A server's log, as record, as text, and as evidence for the audit."""
    found = read_log(data.split(b"\n"))
    json.loads(found.model_dump_json())
    "\n".join(report(found)).encode("utf-8", "surrogatepass")
    audit(gather(log_facts(_text(data).splitlines(), "log")))


def failure(data: bytes) -> None:
    """Lines around a death, with an exit code."""
    code = data[0] - 128 if data else None
    classify(data.split(b"\n"), exit_code=code, ready=None if not data else bool(data[-1] & 1))


def bench(data: bytes) -> None:
    """A benchmark's result."""
    json.loads(read_bench(_text(data)).model_dump_json())


def unit(data: bytes) -> None:
    """A unit, and the same text as a bundle with drop-ins."""
    text = _text(data)
    fragment, dropins, rest = split_bundle(text)
    read_unit(text if fragment is None else fragment, dropins)
    if rest.strip():
        read_journal(rest)


def journal(data: bytes) -> None:
    """A journal."""
    json.loads(read_journal(_text(data)).model_dump_json())


def config(data: bytes) -> None:
    """A config.json with whatever in it, summarised."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return
    if isinstance(value, dict):
        checkpoint_summary(checkpoint_from_configs(value, None), tp=2)


def checkpoint(data: bytes) -> None:
    """A folder whose config is sound and whose safetensors file is this."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        small = {
            "architectures": ["LlamaForCausalLM"],
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "hidden_size": 64,
        }
        (folder / "config.json").write_text(json.dumps(small))
        (folder / "model.safetensors").write_bytes(data)
        checkpoint_summary(read_checkpoint(folder))


def index(data: bytes) -> None:
    """A folder whose index, quantization file and config are this."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part, file in zip(
            data.split(b"\0\0"), ("config.json", "model.safetensors.index.json", "hf_quant_config.json"), strict=False
        ):
            (folder / file).write_bytes(part)
        checkpoint_summary(read_checkpoint(folder))


def facts(data: bytes) -> None:
    """A launch line, an environment, metrics and an answer of /server_info, audited together."""
    parts = [_text(part) for part in data.split(b"\xff")]
    groups = []
    for read, part in zip((flags_facts, environ_facts, metrics_facts), parts, strict=False):
        try:
            groups.append(read(part))
        except WorkbookError:
            continue
    try:
        answer = json.loads(parts[-1])
    except (ValueError, RecursionError):
        answer = None
    if isinstance(answer, dict):
        groups.append(server_info_facts(answer))
    audit(gather(*groups))


def words(data: bytes) -> None:
    """A generated text, events and speeds that somebody noted, and the text without secrets."""
    text = _text(data)
    garbage_signal(text)
    output_signs(text)
    output_hints(text)
    classify_events(text.splitlines())
    classify_speeds(text.splitlines())
    once = redact_text(text)
    assert redact_text(once) == once  # noqa: S101 - what a fuzzer looks for


READERS: dict[str, Callable[[bytes], None]] = {
    read.__name__: read for read in (log, failure, bench, unit, journal, config, checkpoint, index, facts, words)
}


def run(name: str, data: bytes) -> None:
    """One input through one reader; a WorkbookError is an answer, anything else is a fault."""
    try:
        READERS[name](data)
    except WorkbookError as error:
        str(error)
