"""A server stopped in the middle of an answer that does not end: what its last client saw, and that it is gone all the same.

SGLang's main process answers SIGTERM by draining the requests that run ("Draining requests and shutting down"), which never ends here.
Without systemd the ladder is the workbook's own supervisor: SIGTERM to the whole group, which the scheduler does not survive (seen with
0.5.15.post1 on a CPU: the stream was cut, all gone after 5.7 s), a deadline, SIGKILL, whoever is left by identity. Under a unit it is
`lib.deploy.stopping`. Raw record `stop-stream/stream.json`: the answer's events by time and how it ended.
"""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import requests

from lib.errors import WorkbookError
from lib.hosts import local
from lib.records import Measured, Status, Verdict
from lib.results import Answering, NotebookRun, ServerHandle
from lib.server.launch import LaunchRecord
from lib.server.redact import redact_text

FILE = "stream.json"
#: The stop is asked when so many events have come, or is not asked at all after this long.
EVENTS_FIRST, FIRST_S = 8, 120.0
#: Tokens kept free below the server's limits, beside the prompt.
ROOM = 64
PROMPT = "Count without an end: one, two, three,"


class Stream(threading.Thread):
    """Reads one answer of /generate until it ends; every event's time is kept (seconds on this process's clock)."""

    def __init__(self, server: Answering, tokens: int) -> None:
        super().__init__(name="endless-stream", daemon=True)
        self.server, self.tokens = server, tokens
        self.times: list[float] = []
        self.ended_s: float | None = None
        self.how: str | None = None
        self.enough = threading.Event()

    def run(self) -> None:
        """One request that ignores the end of text."""
        control = self.server.control
        body = {
            "text": PROMPT, "stream": True, "sampling_params": {"max_new_tokens": self.tokens, "ignore_eos": True, "temperature": 0},
        }  # fmt: skip
        last = b""
        try:
            with control.session.post(
                f"{control.base_url}/generate", json=body, stream=True, timeout=(10, 600)
            ) as answer:
                if answer.status_code != 200:
                    self.how = f"refused: {answer.status_code} {redact_text(answer.text[:300], control.secrets)}"
                    return
                for line in answer.iter_lines():
                    if not line.startswith(b"data:"):
                        continue
                    self.times.append(time.monotonic())
                    last = line if b"[DONE]" not in line else last
                    if len(self.times) >= EVENTS_FIRST:
                        self.enough.set()
            self.how = ending_of(last)
        except requests.RequestException as error:
            self.how = f"cut off ({type(error).__name__})"
        finally:
            self.ended_s = time.monotonic()
            self.enough.set()


def ending_of(last: bytes) -> str:
    """How an answer ended, by its last event: at its length, ended by the server, or closed in the middle."""
    try:
        reason = json.loads(last.partition(b":")[2]).get("meta_info", {}).get("finish_reason")
    except ValueError:
        reason = None
    kind = reason.get("type") if isinstance(reason, dict) else reason
    if kind is None:
        return "closed in the middle"
    return f"in good order ({kind})" if kind in ("length", "stop") else f"ended by the server ({kind})"


def most_tokens(info: dict[str, Any] | None) -> int:
    """As many tokens as this server would give to one request, by what it said of itself; a million where it said nothing."""
    said = info or {}
    states = said.get("internal_states")
    inner = states[0] if isinstance(states, list) and states and isinstance(states[0], dict) else {}
    limits = [
        value
        for name in ("max_req_input_len", "context_length", "max_total_num_tokens")
        if isinstance(value := said.get(name) or inner.get(name), int)
    ]
    return max(1, min(limits, default=1_000_000) - ROOM)


def stop_under_stream(run: NotebookRun, handle: ServerHandle, launch: LaunchRecord) -> dict[str, Any] | None:
    """Stops the server while one client reads an answer of the greatest length; what that client saw.

    None where there was nothing to stop: attached, or never ready. Offline it is the record of the run.

    Raises:
        NotStopped: as `handle.stop` does; the client's record is kept all the same.
    """
    folder = run.raw / "stop-stream"
    kept = dict(json.loads((folder / FILE).read_text(encoding="utf-8"))) if (folder / FILE).exists() else None
    if run.offline:
        return kept
    if handle.attached or launch.ready_s is None or launch.stop is not None:  # resumed: that launch has had its end
        handle.stop()
        return kept if kept and kept["launch_id"] == launch.launch_id else None
    folder.mkdir(parents=True, exist_ok=True)
    try:
        server = handle.get()
    except WorkbookError as error:
        run.skip("a stop in the middle of an answer", str(error))
        return None
    stream = Stream(server, most_tokens(run.server_info(launch)))
    stream.start()
    stream.enough.wait(FIRST_S)
    asked = time.monotonic()
    running = stream.ended_s is None and len(stream.times) >= EVENTS_FIRST
    try:
        handle.stop()
    finally:
        gone = time.monotonic()
        stream.join(30.0)
        made = _said(stream, server.launch_id, asked, gone, running)
        local.write_atomic(folder / FILE, json.dumps(made, indent=1))
    return made


def _said(stream: Stream, launch_id: str, asked: float, gone: float, running: bool) -> dict[str, Any]:
    after = [t for t in stream.times if t > asked]
    return {
        "launch_id": launch_id, "tokens_asked": stream.tokens, "running_when_asked": running,
        "events_before": len(stream.times) - len(after), "events_after": len(after),
        "last_event_after_s": round(after[-1] - asked, 3) if after else None,
        "ended_after_s": round(stream.ended_s - asked, 3) if stream.ended_s is not None else None,
        "ended": stream.how or "still open 30 s after the stop", "stop_seconds": round(gone - asked, 3),
    }  # fmt: skip


def stream_rows(said: dict[str, Any] | None) -> list[dict[str, Any]]:
    """What the client of the endless answer saw."""
    if said is None:
        return []
    last = said["last_event_after_s"]
    return [
        {"what": "tokens asked for", "value": said["tokens_asked"]},
        {"what": "events before the stop was asked", "value": said["events_before"]},
        {"what": "events after it", "value": said["events_after"]},
        {"what": "last event", "value": f"{last} s after it" if last is not None else "before it"},
        {"what": "the answer ended", "value": f"{said['ended']}, {said['ended_after_s']} s after it"},
    ]


def verdicts(
    run: NotebookRun, handle: ServerHandle, launch: LaunchRecord, said: dict[str, Any] | None
) -> list[Verdict]:
    """Whether a server in the middle of an endless answer is gone after its stop, with its GPU memory."""
    if said is None:
        return []
    record = next((r for r in handle.launches() if r.launch_id == said["launch_id"]), launch)
    proof = record.stop
    common: dict[str, Any] = {
        "id": "gone-under-stream",
        "claim": "A server in the middle of an answer without end is gone after its stop: processes, port and GPU memory",
        "rule": "lib.deploy.ending",
        "limit": "the answer was running when the stop was asked, and did not end in good order; nothing left",
        "launch_ids": [said["launch_id"]],
        "evidence": [
            run.evidence(run.raw / "stop-stream" / FILE),
            run.evidence(run.log_file(record).parent / "launch.json"),
        ],
    }
    if not said["running_when_asked"]:
        why = f"no answer was running: it had ended {said['ended']} after {said['events_before']} events"
        return [Verdict(status=Status.INVALID, reason=why, **common)]
    if proof is None:
        return [Verdict(status=Status.FAIL, reason="its end is not recorded", **common)]
    took = Measured(value=proof.seconds, unit="s", n=1, reason="from the request to stop until nothing was left")
    words = (
        f"{', '.join(proof.signals)} in {proof.seconds} s; {said['events_after']} events after the stop was asked, then {said['ended']}; "
        f"port free: {proof.port_free}; GPU: {proof.gpu_memory}"
    )
    endless = not said["ended"].startswith(("in good order", "still open"))
    status = (
        Status.FAIL
        if not proof.gone or said["ended"].startswith("still open")
        else Status.PASS
        if endless
        else Status.INVALID
    )
    return [Verdict(status=status, measured=took, reason=words, **common)]
