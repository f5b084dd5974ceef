"""Where the loss of a KV cache format comes from: the arithmetic of `lib.model.precision`, run by a Python that has torch.

No server takes part. What is real here is the checkpoint's own K, V and queries for a named text; the rest is seeded
data. The claim «values clip» (said of FP8 caches without scales) is checked on the real tensors.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import signal
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lib.audit.probes import read_document
from lib.errors import HostError, NotMeasured
from lib.hosts import local
from lib.hosts.base import Host
from lib.hosts.remote_client import LONGEST_LEVEL_S, bundle, folder_on
from lib.load.stats import student_t_quantile
from lib.params import ROOT, AuditParams, HostParams, NumericsParams
from lib.records import Evidence, Measured, Prediction, Status, Verdict
from lib.report.progress import progress_bar
from lib.results import NotebookRun, ServerHandle
from lib.server.remote import place_of
from lib.server.spec import resolve_model, resolve_python

JOB = "lib/model/precision_job.py"
ROWS, REQUEST = "rows.jsonl", "request.json"
#: prctl: the job is killed when its parent is gone, however that ended.
PR_SET_PDEATHSIG = 1
CLIP_CLAIM = "No K or V of this checkpoint and text is beyond e4m3's range at scale 1: nothing clips"
PATH_CLAIM = "At the longest context the stored FP8 values are most of an FP8 cache's error on the Triton path"
#: What an emulation of SGLang's kernels gave at 131,072 keys: head_dim 256, Gaussian K and V, 8 splits, logits of standard
#: deviation 2, relative L2 error of one attention output (FACTS 2.4).
EMULATED_KEYS, EMULATED = 131072, {"storage": 0.0026, "triton": 0.052}


def compute_numerics(
    folder: Path,
    python: str,
    request: Mapping[str, Any],
    document: str | None = None,
    on: Mapping[str, Any] | None = None,
) -> None:
    """Writes request.json and rows.jsonl: every row that the job gave, as it gave it.

    Args:
        folder: where the raw files go.
        python: an interpreter with torch (and transformers, if the request names a checkpoint); relative to the project.
        request: keys of `precision_job.REQUEST`; the checkpoint is a folder or an embedded model's name.
        document: the text for a checkpoint: a file or a module of the standard library.
        on: parameters of the host whose interpreter and checkpoint are meant; None: this machine.

    Raises:
        HostError: the job failed; its own last lines are in the message.
        BadInput: no such interpreter, checkpoint or document.
    """
    asked = dict(request)
    place = place_of(HostParams.model_validate(on)) if on else None
    if asked.get("checkpoint") and place is None:
        asked["checkpoint"] = str(resolve_model(asked["checkpoint"]))
    with tempfile.TemporaryDirectory(prefix="workbook-numerics-") as scratch:
        if document is not None:
            text, origin = read_document(document)
            file = Path(scratch) / "text"
            file.write_text(text, encoding="utf-8")
            asked["text"] = str(file)
            kept = {**request, "document": origin, "document_sha256": hashlib.sha256(text.encode()).hexdigest()}
        else:
            kept = dict(request)
        local.write_atomic(folder / REQUEST, json.dumps(kept))
        if place is not None:
            lines, said, code = _run_job_there(place.host, python, asked)
        else:
            lines, said, code = _run_job(str(resolve_python(python)), json.dumps(asked))
    if code != 0:
        last = " / ".join(line.strip() for line in said[-3:])
        raise HostError("the precision job ends with code 0", f"code {code}: {last}", f"run it by hand: {python} {JOB}")
    local.write_atomic(folder / ROWS, "".join(lines))


def _run_job(python: str, request: str) -> tuple[list[str], list[str], int]:
    """Rows, lines of progress and exit code; the job is gone when this returns, also after Ctrl-C."""
    with tempfile.TemporaryFile("w+", encoding="utf-8") as rows, tempfile.TemporaryFile("w+") as asked:
        asked.write(request)
        asked.seek(0)
        process = subprocess.Popen(
            [python, str(ROOT / JOB)], stdin=asked, stdout=rows, stderr=subprocess.PIPE, text=True, cwd=ROOT,
            preexec_fn=_die_with_parent,
        )  # fmt: skip
        said: list[str] = []
        try:
            with progress_bar(None, desc="precision", unit=" steps") as bar:
                for line in process.stderr or ():
                    said = [*said[-40:], line]
                    bar.set_postfix_str(line.strip()[:60])
                    bar.update()
            code = process.wait()
        finally:
            process.kill()
            process.wait()
        rows.seek(0)
        return rows.readlines(), said, code


def _run_job_there(host: Host, python: str, asked: Mapping[str, Any]) -> tuple[list[str], list[str], int]:
    """As `_run_job`, by an interpreter on another host; its text is copied there and nothing is left."""
    with folder_on(host) as place:
        host.put(bundle("lib.model.precision_job")[0], place / "job.pyz", mode=0o600)
        request = dict(asked)
        if request.get("text"):
            host.put(Path(request["text"]), place / "text", mode=0o600)
            request["text"] = str(place / "text")
        with (
            host.start([python, str(place / "job.pyz")], deadline_s=LONGEST_LEVEL_S) as running,
            progress_bar(None, desc=f"precision on {host.name}", unit=" steps") as bar,
        ):
            running.feed(json.dumps(request).encode())
            for name, data in running.output():
                (running.stdout if name == "stdout" else running.stderr).extend(data)
                bar.update(data.count(b"\n") if name == "stderr" else 0)
            done = running.wait()
    return done.text.splitlines(keepends=True), done.error_text.splitlines()[-40:], done.exit_code


def _die_with_parent() -> None:
    """In the forked child: it does not outlive the notebook's kernel, also where that is killed."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def measure_numerics(run: NotebookRun, handle: ServerHandle) -> Numerics:
    """Notebook 05's numerics: computed once by the server's Python, no server beside it; empty with a reason where not.

    Args:
        run: the notebook's run; its `numerics` say what is computed.
        handle: the server whose interpreter and checkpoint are taken.
    """
    params, why, failed = run.params, None, False
    if not isinstance(params, AuditParams) or params.numerics is None:
        why = "not asked for (numerics: null)"
    elif run.attached:
        why = "the server is attached: its interpreter and its checkpoint are not this machine's to use"
    if why is None and isinstance(params, AuditParams) and params.numerics is not None:
        request = params.numerics.request(run.profile.server.model)
        document = params.numerics.document if request.get("checkpoint") else None
        try:
            taken = run.measure(
                "numerics", None, compute_numerics, keep_errors=True,
                context=handle.spec.model if request.get("checkpoint") and not run.offline else None,
                python=run.profile.server.python, request=request, document=document, **run.there,
            )  # fmt: skip
        except NotMeasured as error:  # a run of before this record existed
            why = str(error)
        else:
            if taken.ok:
                return read_numerics(taken.folder, run.evidence(taken.folder / ROWS))
            why, failed = taken.problem, True
    run.skip("where the loss comes from", why or "not computed")
    return Numerics([], reason=why, failed=failed)


class Numerics:
    """The rows of one job, for tables, figures and verdicts."""

    def __init__(
        self,
        rows: Iterable[Mapping[str, Any]],
        evidence: Evidence | None = None,
        reason: str | None = None,
        failed: bool = False,
    ) -> None:
        self.rows = [dict(r) for r in rows]
        self.reason, self.failed = reason, failed
        self.evidence = [evidence] if evidence else []
        self.machine = next((r for r in self.rows if r["row"] == "machine"), {})

    def attention(self, source: str | None = None) -> list[dict[str, Any]]:
        """Rows of attention errors, of one source or of all."""
        return [r for r in self.rows if r["row"] == "attention" and source in (None, r["source"])]

    def rounding(self) -> list[dict[str, Any]]:
        """Rows of rounding losses of the checkpoint's K and V."""
        return [r for r in self.rows if r["row"] == "rounding"]


def read_numerics(folder: Path, evidence: Evidence | None = None) -> Numerics:
    """The rows of a folder that `compute_numerics` wrote."""
    return Numerics([json.loads(line) for line in (folder / ROWS).read_text().splitlines()], evidence)


def arm_name(row: Mapping[str, Any]) -> str:
    """An arm in words: `fp8_e4m3, storage, scale 1`."""
    scales = "own scales" if row["format"] in ("nvfp4", "fp4_mx_block16") else "no scale" if row["format"] == "bf16" else (
        "calibrated" if row["scales"] == "calibrated" else "scale 1"
    )  # fmt: skip
    return f"{row['format']}, {row['path']}, {scales}"


def error_of(units: Sequence[float | None]) -> Measured:
    """Mean of independent units (draws, layers) as a share, with Student's interval from three units on."""
    values = [u for u in units if u is not None]
    n = len(values)
    if n < len(units):
        return Measured(value=None, reason=f"{len(units) - n} of {len(units)} are not finite: values beyond the range")
    if not n:
        return Measured(value=None, reason="nothing was computed")
    mean = sum(values) / n
    if n < 3:
        return Measured(value=mean, unit="frac", n=n, reason="fewer than 3 independent draws: no interval")
    half = student_t_quantile(0.975, n - 1) * (sum((v - mean) ** 2 for v in values) / (n - 1) / n) ** 0.5
    return Measured(value=mean, unit="frac", n=n, low=mean - half, high=mean + half)


def pooled(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Attention rows with one source, context and arm pooled over what they repeat (draws, or the checkpoint's layers)."""
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["source"], row["keys"], arm_name(row)), []).append(row)
    out = []
    for (source, keys, arm), members in groups.items():
        units = [u for m in members for u in m["error_rel_units"]]
        finite = [u for u in units if u is not None]
        out.append({
            "source": source, "keys": keys, "arm": arm, "format": members[0]["format"], "path": members[0]["path"],
            "error": error_of(units), "largest": max(finite) if finite else None, "units": members[0]["units"],
            "dropped_frac": sum(m["dropped_frac"] for m in members) / len(members),
        })  # fmt: skip
    return out


def attention_rows(numerics: Numerics, source: str | None = None) -> list[dict[str, Any]]:
    """Rows of the table: relative error of one attention output by source, context and arm."""
    return [
        {
            "data": p["source"], "keys": p["keys"], "format, path, scale": p["arm"], "relative error": p["error"],
            "largest": Measured(value=p["largest"], unit="frac", reason=None if p["largest"] is not None else "none"),
            "mass cast to 0": Measured(value=p["dropped_frac"], unit="frac"), "over": p["units"],
        }
        for p in pooled(numerics.attention(source))
    ]  # fmt: skip


def error_series(numerics: Numerics, source: str) -> dict[str, list[dict[str, Any]]]:
    """Error by context of each arm of one source, for a figure: name -> points with `keys` and `error`."""
    series: dict[str, list[dict[str, Any]]] = {}
    for p in pooled(numerics.attention(source)):
        series.setdefault(p["arm"], []).append({"keys": p["keys"], "error": p["error"]})
    return series


def numerics_predictions(params: NumericsParams | None, numerics: Numerics | None = None) -> list[Prediction]:
    """An emulation's errors at 131,072 keys, by kind of Gaussian data and path, beside what was computed here (if it was)."""
    if params is None or (params.keys is not None and EMULATED_KEYS not in params.keys):
        return []
    found = (
        {(p["source"], p["path"]): p["error"] for p in pooled(numerics.attention()) if _emulated(p)} if numerics else {}
    )
    kinds = params.kinds if params.kinds is not None else ["gaussian_mean", "gaussian"]
    return [
        Prediction(
            id=f"error-{kind}-{path}",
            what=f"relative error of one attention output, {EMULATED_KEYS:,} keys, fp8_e4m3, {path}, {kind}",
            predicted=Measured(value=predicted, unit="frac", reason="emulated, Gaussian K and V"),
            formula="|output - exact| / |exact|, exact in float64", source="FACTS 2.4", measured=found.get((kind, path)),
        )
        for kind in kinds if kind in ("gaussian_mean", "gaussian")
        for path, predicted in EMULATED.items()
    ]  # fmt: skip


def _emulated(p: Mapping[str, Any]) -> bool:
    """True for what the emulation gave too: e4m3 at scale 1, its two paths, its number of keys, Gaussian data."""
    return (
        p["keys"] == EMULATED_KEYS and p["format"] == "fp8_e4m3" and p["path"] in EMULATED and "calibrated" not in p["arm"]
        and str(p["source"]).startswith("gaussian")
    )  # fmt: skip


def rounding_rows(numerics: Numerics) -> list[dict[str, Any]]:
    """Rows of the table: where K and V of the checkpoint lose, by format and scale, over all layers that were asked."""
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for row in numerics.rounding():
        groups.setdefault((row["tensor"], row["format"], row["scales"]), []).append(row)

    def share(value: float) -> Measured:
        return Measured(value=value, unit="frac")

    return [
        {
            "tensor": tensor, "format": name, "scale": "1" if scales == "one" else "calibrated to the tensor",
            "largest |x|": max(m["largest"] for m in rows), "largest |x| / scale": max(m["largest_scaled"] for m in rows),
            "relative rms error": share(sum(m["relative_rms_error"] for m in rows) / len(rows)),
            "elements clipped": share(max(m["clipped_frac"] for m in rows)),
            "below normal range": share(sum(m["subnormal_frac"] + m["flushed_frac"] for m in rows) / len(rows)),
            "error from the mantissa": share(min(m["mantissa_error_frac"] or 0.0 for m in rows)), "layers": len(rows),
        }
        for (tensor, name, scales), rows in groups.items()
    ]  # fmt: skip


def numerics_verdicts(numerics: Numerics) -> list[Verdict]:
    """Verdicts: do values clip; does more than storage count on the Triton path at the longest context."""
    if numerics.failed:
        return [
            Verdict(
                id=id_, claim=claim, status=Status.INCONCLUSIVE, limit="numerics computed", rule="lib.model.precision",
                reason=numerics.reason or "the job failed",
            )
            for id_, claim in (("values-clip", CLIP_CLAIM), ("storage-is-the-cost", PATH_CLAIM))
        ]  # fmt: skip
    return [v for v in (_clip_verdict(numerics), _path_verdict(numerics)) if v is not None]


def _clip_verdict(numerics: Numerics) -> Verdict | None:
    rows = [r for r in numerics.rounding() if r["format"] == "fp8_e4m3" and r["scales"] == "one"]
    if not rows:
        return None
    worst = max(rows, key=lambda r: r["largest"])
    clipped = max(r["clipped_frac"] for r in rows)
    mantissa = min(r["mantissa_error_frac"] or 0.0 for r in rows)
    layers = len({r["layer"] for r in rows})
    outside = (
        f"; on this torch a value beyond 448 {numerics.machine.get('overflow', {}).get('fp8_e4m3', 'is cast somehow')}"
    )
    words = (
        f"largest |x| {worst['largest']:.4g} ({worst['tensor']}, layer {worst['layer']}) against 448; at least "
        f"{mantissa:.2%} of the squared error is rounding of the mantissa{outside if clipped else ''}"
    )
    return Verdict(
        id="values-clip", claim=CLIP_CLAIM,
        status=Status.PASS if clipped == 0 else Status.FAIL, limit="0 elements beyond 448", rule="lib.model.precision",
        measured=Measured(value=clipped, unit="frac", n=sum(r["elements"] for r in rows), reason=f"worst of {layers} layers"),
        reason=words, evidence=numerics.evidence,
    )  # fmt: skip


def _path_verdict(numerics: Numerics) -> Verdict | None:
    found = [p for p in pooled(numerics.attention()) if p["source"] != "checkpoint" and p["format"] == "fp8_e4m3"]
    if not found:
        return None
    longest = max(p["keys"] for p in found)
    at = {(p["source"], p["path"]): p for p in found if p["keys"] == longest and "calibrated" not in p["arm"]}
    sources = sorted({s for s, path in at if path == "triton" and (s, "storage") in at})
    if not sources:
        return None
    ratios = {
        s: at[s, "triton"]["error"].value / at[s, "storage"]["error"].value
        for s in sources
        if at[s, "triton"]["error"].value is not None and at[s, "storage"]["error"].value
    }
    words = "; ".join(
        f"{s}: storage {at[s, 'storage']['error'].value:.2%}, with the casts of q and the weights {at[s, 'triton']['error'].value:.2%}"
        for s in ratios
    )
    more = [s for s, ratio in ratios.items() if ratio > 2]
    status = Status.FAIL if more else Status.PASS if ratios else Status.INCONCLUSIVE
    return Verdict(
        id="storage-is-the-cost", claim=PATH_CLAIM,
        status=status, limit=f"at {longest:,} keys: error with the casts at most twice that of storage alone, on all kinds of data",
        rule="lib.model.precision", reason=words or "no finite error to compare", evidence=numerics.evidence,
        measured=Measured(value=max(ratios.values()), unit="x", n=len(ratios), reason="largest ratio over kinds of data")
        if ratios else None,
    )  # fmt: skip
