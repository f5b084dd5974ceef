"""Judge what a benchmark file says: is it valid, what do its numbers mean, and what do they not show.

`read_bench` gives the table of rows, what follows from each row, and findings. `error`: the numbers must not be used as
they are. `warning`: they say something else than they seem to. `info`: worth knowing when comparing.

Each rule is one function in RULES. Source of the definitions: sglang/benchmark/serving.py 0.5.15 (`calculate_metrics`),
vllm/benchmarks/serve.py, aiperf 0.13, guidellm 0.8; of the client limits: a comparison of ten clients with a server
that knows the truth, one client core, Nov 2026.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import median

from lib.findings import Finding, worst_level
from lib.load.bench_readers import BenchRow, Details, Stats, read_rows
from lib.records import Record
from lib.server.redact import find_secrets, redact_object

__all__ = ["BenchReading", "BenchReport", "BenchRow", "Stats", "read_bench"]

#: Chunks per second up to which a client's numbers were within 2% (throughput) and 5% (ITL) on one core.
CLIENT_CHUNKS_PER_S: dict[str, float] = {
    "sglang.bench_serving": 12_000,
    "sglang.bench_serving native": 19_700,
    "vllm bench serve": 29_300,
    "aiperf": 3_900,
    "guidellm": 9_700,
}
#: From here on Python clients showed a TTFT 20 to 40 ms too high, and at 1024 streams 9 to 76% of the load was missing.
CLIENT_STREAMS_NOTED = 256
CLIENT_STREAMS_TOO_MANY = 1024

#: A text's command lines may hold keys; they stand near its beginning.
_SECRETS_SOUGHT_IN = 1 << 20

MIN_SUCCESS_FRAC = 0.95
SPREAD_LIMIT = 1.5


class BenchReading(Record):
    """What follows from one row; None where the row does not allow to say it."""

    label: str | None = None
    valid: bool = True
    success_frac: float | None = None
    output_tokens_per_request: float | None = None
    input_tokens_per_request: float | None = None
    input_vision_frac: float | None = None
    streaming: bool | None = None
    itl_kind: str | None = None
    itl_meaningful: bool | None = None
    ttft_equals_e2e: bool | None = None
    tokens_per_chunk: float | None = None
    bundled_tokens_suspected: bool | None = None
    ignore_eos_effective: bool | None = None
    rate_achieved_frac: float | None = None
    rate_expected_frac: float | None = None
    concurrency_decoding: float | None = None
    concurrency_predicted: float | None = None
    tpot_consistent: bool | None = None
    consistent: bool | None = None
    drafts_accepted_per_step: float | None = None
    draft_acceptance_frac: float | None = None
    client_bound_suspected: bool | None = None
    first_wave_ttft_ratio: float | None = None
    warmup_excluded: bool | None = None
    first_warmup_ttft_ms: float | None = None


class BenchReport(Record):
    """A benchmark file: rows as read, readings of each, findings over all."""

    format: str
    rows: tuple[BenchRow, ...]
    readings: tuple[BenchReading, ...]
    findings: tuple[Finding, ...]
    severity: str | None
    valid: bool
    run_sections: int | None = None
    odd_keys: tuple[str, ...] = ()
    repeated: dict[str, tuple[float, ...]] = {}
    spread_ratio: float | None = None
    spread_of: str | None = None
    single_run_trustworthy: bool | None = None


class _Context:
    """A row with its details and what several rules need of it."""

    def __init__(self, row: BenchRow, details: Details, index: int, many: bool) -> None:
        self.row, self.details, self.index = row, details, index
        self.where = f"run {index + 1}: " if many else ""
        self.reading = _reading(row, details)

    def find(self, id_: str, level: str, what: str, do: str, evidence: str = "", source: str = "") -> Finding:
        line = self.details.lines[0] if self.details.lines else None
        return Finding(id=id_, level=level, what=self.where + what, evidence=evidence, line=line, do=do, source=source)


Rule = Callable[[_Context], Iterator[Finding]]


def read_bench(text: str) -> BenchReport:
    """The benchmark's rows, their reading and the findings; secrets in an embedded server_info are hidden.

    Raises:
        UnreadableFile: if no known form is found in the text.

    Example: 1648 successes of `--num-prompts 3000` give `success_frac` 0.549 and the error `failed_requests`.
    """
    rows, details = read_rows(text)
    contexts = [
        _Context(row, extra, index, len(rows) > 1) for index, (row, extra) in enumerate(zip(rows, details, strict=True))
    ]
    findings: list[Finding] = []
    readings: list[BenchReading] = []
    possible: list[int] = []
    for context in contexts:
        own = list(_impossible(context))
        if own:  # nothing follows from a row that cannot be: no rule reads it, no reading is derived
            findings.extend([*own, *_faults(context), *_secrets(context)])
            readings.append(BenchReading(label=context.row.label, valid=False))
            continue
        possible.append(context.index)
        own = [finding for rule in RULES for finding in rule(context)]
        findings.extend(own)
        valid = not any(finding.level == "error" for finding in own)
        readings.append(context.reading.model_copy(update={"valid": valid}))
    repeated = _repeated([rows[index] for index in possible], [details[index] for index in possible])
    name, ratio = _widest(repeated)
    findings.extend(_judge_runs(rows, repeated, name, ratio))
    findings.sort(key=lambda finding: {"error": 0, "warning": 1, "info": 2}[finding.level])
    secrets = {secret for extra in details for secret in extra.secrets}
    if text.lstrip()[:1] not in ("{", "["):
        secrets.update(find_secrets(text[:_SECRETS_SOUGHT_IN]))
    report = BenchReport(
        format=rows[0].format,
        rows=tuple(rows),
        readings=tuple(readings),
        findings=tuple(findings),
        severity=worst_level(findings),
        valid=all(reading.valid for reading in readings),
        run_sections=sum(extra.run_sections for extra in details) or None,
        odd_keys=tuple(dict.fromkeys(key for extra in details for key in extra.odd_keys)),
        repeated=repeated,
        spread_ratio=ratio,
        spread_of=name,
        single_run_trustworthy=None if ratio is None else ratio <= SPREAD_LIMIT,
    )
    return redact_object(report, sorted(secrets))


def _share(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None


def _mean(stats: Stats | None) -> float | None:
    if stats is None:
        return None
    return stats.mean if stats.mean is not None else stats.median


def _reading(row: BenchRow, details: Details) -> BenchReading:
    per_request = _share(row.output_tokens, row.completed)
    if per_request is None and row.requests_per_s and row.output_tokens_per_s is not None and not row.runs:
        per_request = row.output_tokens_per_s / row.requests_per_s
    e2e, ttft, tpot, itl = _mean(row.e2e_ms), _mean(row.ttft_ms), _mean(row.tpot_ms), _mean(row.itl_ms)
    same = abs(e2e - ttft) <= 0.005 * e2e if e2e and ttft is not None else None
    several = per_request is not None and per_request > 1.5
    streaming = row.streaming
    if streaming is None and ttft is not None and row.completed != 0:
        if ttft == 0 or (same and several):
            streaming = False
        elif same is False or (tpot or itl):
            streaming = True
    kind = _itl_kind(row)
    meaningful: bool | None = None
    if itl is not None or tpot is not None:
        meaningful = (
            not (per_request is not None and per_request <= 1.0) and streaming is not False and bool(itl or tpot)
        )
    elif streaming is False:
        meaningful = False
    chunk = None
    if details.chunks and details.output_lens and kind == "chunk_gap":
        tokens = sum(max(0, length - 1) for length in details.output_lens)
        chunk = tokens / sum(details.chunks) if sum(details.chunks) else None
    elif kind == "chunk_gap" and itl and tpot:
        chunk = max(1.0, itl / tpot)
    elif row.chunk_gap_ms and tpot:
        gap = _mean(row.chunk_gap_ms)
        chunk = max(1.0, gap / tpot) if gap else None
    decoding = row.output_tokens_per_s * tpot / 1e3 if row.output_tokens_per_s is not None and tpot else None
    predicted = None
    if decoding is not None and several and per_request:
        predicted = decoding * (per_request - 1) / per_request + (row.requests_per_s or 0) * (ttft or 0) / 1e3
    success = None
    if row.completed is not None and row.requested:
        success = min(1.0, row.completed / row.requested)
    achieved = _share(row.requests_per_s, row.request_rate_per_s)
    return BenchReading(
        label=row.label,
        success_frac=success,
        output_tokens_per_request=per_request,
        input_tokens_per_request=_share(row.input_tokens, row.completed),
        input_vision_frac=_share(row.input_vision_tokens, row.input_tokens),
        streaming=streaming,
        itl_kind=kind,
        itl_meaningful=meaningful,
        ttft_equals_e2e=same,
        tokens_per_chunk=chunk,
        bundled_tokens_suspected=_bundled(row, kind, per_request),
        ignore_eos_effective=_length_kept(row, per_request),
        rate_achieved_frac=achieved,
        rate_expected_frac=_rate_with_tail(row, per_request),
        concurrency_decoding=decoding,
        concurrency_predicted=predicted,
        tpot_consistent=(fits := _tpot_consistent(row, decoding, predicted)),
        consistent=False if next(_contradicted_rates(row), None) else fits,
        drafts_accepted_per_step=row.accept_length - 1 if row.accept_length is not None else None,
        draft_acceptance_frac=_share(row.accept_length - 1, row.num_steps) if row.accept_length is not None else None,
        client_bound_suspected=_client_bound(row, chunk),
        first_wave_ttft_ratio=_first_wave(row, details),
        warmup_excluded=_warmup_excluded(details),
        first_warmup_ttft_ms=details.warmup_ttft_ms[0] if details.warmup_ttft_ms else None,
    )


def _itl_kind(row: BenchRow) -> str | None:
    """What the file's inter-token latency is: of a token, of a chunk, or a mean over each request."""
    if row.tool in ("aiperf", "guidellm"):
        return "per_request_mean"
    if row.tool == "sglang.bench_serving" and row.backend:
        return "per_token" if row.backend in ("sglang", "sglang-native") else "chunk_gap"
    return "chunk_gap" if row.tool == "vllm bench serve" else None


def _bundled(row: BenchRow, kind: str | None, per_request: float | None) -> bool | None:
    """Whether several tokens arrive at once: the second comes far too soon, or half the gaps are near 0."""
    e2e, ttft, tpot, second = _mean(row.e2e_ms), _mean(row.ttft_ms), _mean(row.tpot_ms), _mean(row.ttst_ms)
    if second is not None:
        if tpot:
            return second < 0.1 * tpot
        if e2e is not None and ttft is not None:
            return second < 1.0 and e2e - ttft > 100 * second
    if kind == "chunk_gap" and row.itl_ms and row.itl_ms.median is not None and tpot:
        return row.itl_ms.median < 0.2 * tpot
    if row.chunk_gap_ms and tpot:
        gap = _mean(row.chunk_gap_ms)
        return gap is not None and gap > 1.3 * tpot
    return None


def _length_kept(row: BenchRow, per_request: float | None) -> bool | None:
    """Whether the answers have the length that was asked for, as ignore_eos makes them."""
    if row.output_len_expected is None or per_request is None:
        return None
    spread = row.output_len_asked is not None and row.output_len_expected < 0.99 * row.output_len_asked
    return per_request >= (0.8 if spread else 0.98) * row.output_len_expected


def _rate_with_tail(row: BenchRow, per_request: float | None) -> float | None:
    """The share of the asked rate that is possible at all: the duration contains the last request's own time."""
    if not row.request_rate_per_s or not row.completed:
        return None
    e2e, ttft, tpot = _mean(row.e2e_ms), _mean(row.ttft_ms), _mean(row.tpot_ms)
    if e2e is None and ttft is not None and tpot is not None and per_request is not None:
        e2e = ttft + tpot * max(0.0, per_request - 1)
    if e2e is None:
        return None
    sending = row.completed / row.request_rate_per_s
    return sending / (sending + e2e / 1e3)


def _contradicted_rates(row: BenchRow) -> Iterator[tuple[str, float, float]]:
    """Rates that are not their count over the duration: name, what is shown, what follows."""
    for name, shown, count in (
        ("requests_per_s", row.requests_per_s, row.completed),
        ("output_tokens_per_s", row.output_tokens_per_s, row.output_tokens),
        ("input_tokens_per_s", row.input_tokens_per_s, row.input_tokens),
    ):
        derived = _share(count, row.duration_s)
        if shown is not None and derived is not None and abs(shown - derived) > 0.02 * derived + 0.006:
            yield name, shown, derived


def _tpot_consistent(row: BenchRow, decoding: float | None, predicted: float | None) -> bool | None:
    """Whether TPOT and throughput can both be right: their product is the number of requests decoding at once."""
    if decoding is None:
        return None
    limits = [value for value in (row.peak_concurrency, row.max_concurrency, row.completed) if value]
    if limits and decoding > 1.15 * min(limits):
        return False
    if row.concurrency and predicted is not None:
        return abs(predicted - row.concurrency) <= 0.3 * row.concurrency + 0.5
    return True


def _client_bound(row: BenchRow, chunk: float | None) -> bool | None:
    streams = row.peak_concurrency or row.concurrency or row.max_concurrency
    name = row.tool + (" native" if row.backend == "sglang" and row.tool == "sglang.bench_serving" else "")
    limit = CLIENT_CHUNKS_PER_S.get(name)
    if limit is None:
        return None
    rate = (row.output_tokens_per_s or 0) / (chunk or 1)
    return rate > 0.8 * limit or (streams or 0) >= CLIENT_STREAMS_TOO_MANY


def _first_wave(row: BenchRow, details: Details) -> float | None:
    """Median TTFT of the first wave of requests over that of the others."""
    wave = row.max_concurrency or 1
    if len(details.ttfts_s) < 2 * wave or len(details.ttfts_s) < 4:
        return None
    rest = median(details.ttfts_s[wave:])
    return median(details.ttfts_s[:wave]) / rest if rest else None


def _warmup_excluded(details: Details) -> bool | None:
    """Whether the summary's means are those of the measured runs alone."""
    if not details.warmup_runs or not details.summary:
        return None
    verdicts = []
    for key, mean in details.summary.items():
        alone, together = details.runs_mean.get(key), details.all_runs_mean.get(key)
        if alone is not None and together is not None and abs(alone - together) > 0.01 * abs(alone):
            verdicts.append(abs(mean - alone) < abs(mean - together))
    return all(verdicts) if verdicts else None


def _repeated(rows: list[BenchRow], details: list[Details]) -> dict[str, tuple[float, ...]]:
    """Values of several runs of the same configuration: listed in the text, or rows that are alike."""
    found: dict[str, tuple[float, ...]] = {}
    for extra in details:
        for name, values in extra.repeated.items():
            found.setdefault(name, values)
    groups: dict[tuple[object, ...], list[BenchRow]] = {}
    for row in rows:
        key = (
            row.tool,
            row.backend,
            row.model,
            row.dataset,
            row.max_concurrency,
            row.request_rate_per_s,
            row.input_len_asked,
            row.output_len_asked,
            row.requested,
            row.label if row.format in ("table", "runs_text", "guidellm") else None,
        )
        groups.setdefault(key, []).append(row)
    for group in groups.values():
        if len(group) < 2:
            continue
        for name, read in (
            ("ttft_ms", lambda r: _mean(r.ttft_ms)),
            ("output_tokens_per_s", lambda r: r.output_tokens_per_s),
        ):
            series = tuple(value for value in map(read, group) if value is not None)
            if len(series) >= 2:
                found.setdefault(name, series)
    return found


def _widest(repeated: dict[str, tuple[float, ...]]) -> tuple[str | None, float | None]:
    ratios = {name: max(values) / min(values) for name, values in repeated.items() if min(values) > 0}
    if not ratios:
        return None, None
    name = max(ratios, key=lambda key: ratios[key])
    return name, ratios[name]


def _judge_runs(
    rows: list[BenchRow], repeated: dict[str, tuple[float, ...]], name: str | None, ratio: float | None
) -> Iterator[Finding]:
    if ratio is not None and name is not None:
        values = ", ".join(f"{value:g}" for value in repeated[name][:10])
        if ratio > SPREAD_LIMIT:
            yield Finding(
                id="runs_differ",
                level="warning",
                evidence=f"{name}: {values}",
                do="Find the cause (warm-up, cache, other load) before quoting any.",
                what=f"{len(repeated[name])} runs of the same test differ by a factor of {ratio:.3g} in {name}:"
                " none of them alone says anything.",
            )
    elif not any(row.runs for row in rows):
        yield Finding(
            id="one_run",
            level="info",
            what="Each configuration was run once: the numbers have no interval.",
            do="Repeat it at least three times.",
        )


# ---- what no run can give --------------------------------------------------------------------------------------------

_NEVER_NEGATIVE = (
    "requested", "completed", "failed", "max_concurrency", "input_tokens", "input_text_tokens", "input_vision_tokens",
    "output_tokens", "output_tokens_retokenized", "requests_per_s", "goodput_requests_per_s", "input_tokens_per_s",
    "output_tokens_per_s", "total_tokens_per_s", "peak_output_tokens_per_s", "peak_concurrency", "concurrency",
    "decode_tokens_per_s", "wall_tokens_per_s", "request_rate_per_s", "accept_length", "input_len_asked",
    "output_len_asked", "e2e_ms", "ttft_ms", "ttst_ms", "tpot_ms", "itl_ms", "chunk_gap_ms", "client_queue_ms",
)  # fmt: skip


def _impossible(c: _Context) -> Iterator[Finding]:
    """Numbers that no run can have, whatever it measured: the file is damaged, edited or put together from several."""
    do = "Use no number of it; run it again, or copy the tool's own file."
    row = c.row

    def find(id_: str, what: str, evidence: str) -> Finding:
        return c.find(id_, "error", what, do, evidence)

    if row.duration_s is not None and row.duration_s <= 0:
        yield find(
            "impossible_duration", f"The run is said to have taken {row.duration_s:g} s.", f"duration {row.duration_s:g}"
        )
    negative = []
    for name in _NEVER_NEGATIVE:
        value = getattr(row, name)
        members = {"": value}
        if isinstance(value, Stats):
            members = {f" {key}": number for key, number in value.model_dump(exclude_none=True).items()}
        negative += [f"{name}{key} {number:g}" for key, number in members.items() if number is not None and number < 0]
    if negative:
        yield find("negative_number", f"Below zero: {', '.join(negative[:8])}.", ", ".join(negative[:8]))
    if row.completed is None or row.completed < 0:
        return
    if row.requested is not None and row.completed > row.requested >= 0:
        yield find(
            "more_completed_than_sent",
            f"{row.completed} requests succeeded of {row.requested} that were sent.",
            f"completed {row.completed}, requested {row.requested}",
        )
    elif (
        (c.details.failed_counted or row.format in ("sglang_text", "vllm_text"))
        and row.failed is not None
        and row.requested is not None
        and min(row.failed, row.requested) >= 0
        and row.completed + row.failed != row.requested
    ):
        yield find(
            "requests_do_not_add_up",
            f"{row.completed} succeeded and {row.failed} failed, but {row.requested} were sent.",
            f"completed {row.completed} + failed {row.failed}, requested {row.requested}",
        )
    lens = c.details.list_lens
    allowed = {row.completed, row.requested}
    if lens and (len(set(lens.values())) > 1 or not set(lens.values()) <= allowed):
        shown = ", ".join(f"{key} {length}" for key, length in lens.items())
        yield find(
            "lists_of_other_length",
            f"The per-request lists do not belong to {row.completed} succeeded requests: {shown} entries.",
            f"completed {row.completed}; {shown}",
        )


# ---- rules -----------------------------------------------------------------------------------------------------------


def _failures(c: _Context) -> Iterator[Finding]:
    row, frac = c.row, c.reading.success_frac
    if row.completed == 0 and row.requested != 0:
        yield c.find(
            "failed_requests",
            "error",
            "No request succeeded.",
            "Look at the errors; check the model's name.",
            "completed 0",
        )
    elif frac is not None and frac < 1 and row.requested is not None and row.completed is not None:
        lost = row.requested - row.completed
        level = "error" if frac < MIN_SUCCESS_FRAC else "warning"
        yield c.find(
            "failed_requests",
            level,
            f"{lost} of {row.requested} requests failed ({1 - frac:.1%}).",
            "Find out why before using any number.",
            f"completed {row.completed} of {row.requested}",
        )
        yield c.find(
            "survivorship",
            "warning",
            "Latencies are those of the survivors only, while the duration contains the failures: what the slowest"
            " requests would have shown is missing.",
            "Compare runs without failures only.",
        )
    elif frac is None and not row.failed and row.format in ("sglang_text", "sglang_jsonl", "vllm_text", "vllm_json"):
        yield c.find(
            "failures_unknown",
            "info",
            "The file has no count of failed requests and no number of prompts to compare with.",
            "Compare with --num-prompts of the command.",
            f"completed {row.completed}",
        )
    elif frac is None and row.failed:
        yield c.find(
            "failed_requests",
            "error",
            f"{row.failed} requests failed.",
            "Find out why before using any number.",
            f"failed {row.failed}",
        )
    if c.details.errors:
        yield c.find(
            "error_texts",
            "info",
            f"{len(c.details.errors)} requests carry an error text.",
            "Read them.",
            c.details.errors[0],
        )


def _faults(c: _Context) -> Iterator[Finding]:
    for fault in c.details.faults:
        level = "info" if "still running" in fault else "error"
        yield c.find(
            "incomplete_file" if level == "error" else "unfinished_requests",
            level,
            f"The file is incomplete: {fault}." if level == "error" else f"{fault[0].upper()}{fault[1:]}.",
            "Copy the file again, or run it again.",
        )
    if c.details.not_numbers:
        names = ", ".join(c.details.not_numbers[:8])
        yield c.find(
            "not_a_number",
            "error",
            f"No finite number stands in: {names}.",
            "Nothing was put in its place; run it again.",
            names,
        )


def _rate(c: _Context) -> Iterator[Finding]:
    row, frac, possible = c.row, c.reading.rate_achieved_frac, c.reading.rate_expected_frac
    if frac is None or frac >= 0.95:
        return
    tail = possible is not None and frac >= 0.9 * possible
    why = (
        "most of it is the last requests' own time"
        if tail
        else "the server or the client did not keep up, or a concurrency limit held requests back"
    )
    yield c.find(
        "rate_not_reached",
        "info" if tail else "warning",
        f"{row.requests_per_s:.4g} of {row.request_rate_per_s:.4g} requests/s were served ({frac:.0%}): {why}.",
        "Compare with the arrival times; run longer." if tail else "Do not quote it as a result at the asked rate.",
        f"request_rate {row.request_rate_per_s:g}, achieved {row.requests_per_s:.4g}",
    )


def _length(c: _Context) -> Iterator[Finding]:
    row, reading = c.row, c.reading
    if reading.ignore_eos_effective is False:
        yield c.find(
            "length_not_kept",
            "warning",
            f"Answers have {reading.output_tokens_per_request:.4g} tokens on average,"
            f" {row.output_len_expected:.4g} were asked for: the end-of-text"
            " token was not ignored, so the work differs from run to run.",
            "Set ignore_eos where the server takes it, or compare at equal lengths.",
            f"{row.output_tokens} / {row.completed}",
        )
    if (
        row.output_len_expected is not None
        and row.output_len_asked
        and row.output_len_expected < 0.99 * row.output_len_asked
    ):
        yield c.find(
            "length_is_an_upper_bound",
            "info",
            f"Lengths are drawn up to {row.output_len_asked:g}: {row.output_len_expected:.4g} on average.",
            "Set --random-range-ratio 1.0 for equal lengths.",
            source="sglang/benchmark/serving.py",
        )
    if row.output_tokens and row.output_tokens_retokenized is not None:
        share = row.output_tokens_retokenized / row.output_tokens
        if share < 0.8:
            yield c.find(
                "counted_as_asked",
                "warning",
                f"The answers' text has {share:.0%} of the tokens that are counted: the count may be the"
                " requested length,"
                " not what was generated.",
                "Count by the server's usage field.",
                f"{row.output_tokens_retokenized} of {row.output_tokens}",
            )
        elif abs(share - 1) > 0.02:
            yield c.find(
                "retokenized_differs",
                "info",
                f"Tokenizing the answers again gives {share:.1%} of the count: the text does not map back to its tokens"
                " (as with random ids).",
                "Use the server's count.",
                f"{row.output_tokens_retokenized} of {row.output_tokens}",
            )


def _latency(c: _Context) -> Iterator[Finding]:
    row, reading = c.row, c.reading
    n = reading.output_tokens_per_request
    if reading.streaming is False:
        why = (
            "null"
            if c.details.nulls
            else "0"
            if _mean(row.ttft_ms) == 0
            else "the whole latency"
            if reading.ttft_equals_e2e
            else "absent"
        )
        yield c.find(
            "not_streamed",
            "warning",
            f"The answers were not streamed: TTFT is {why}, TTFT and inter-token latency were not measured.",
            "Run it with streaming.",
            ", ".join(c.details.nulls[:5]),
        )
    elif n is not None and n <= 1.0 and (row.itl_ms or row.tpot_ms):
        yield c.find(
            "itl_undefined",
            "warning",
            "One token per request: there is no gap between tokens, and the printed 0 is no latency.",
            "Read TTFT as prefill time only.",
            f"{row.output_tokens} tokens, {row.completed} requests",
        )
    elif reading.itl_kind == "chunk_gap" and reading.tokens_per_chunk and reading.tokens_per_chunk >= 1.3:
        yield c.find(
            "itl_is_chunk_gap",
            "warning",
            f"The inter-token latency is the gap between chunks of about {reading.tokens_per_chunk:.2g} tokens:"
            " per token it is"
            " TPOT.",
            "Compare TPOT, and show both.",
            f"ITL {_mean(row.itl_ms) or 0:.4g} ms, TPOT {_mean(row.tpot_ms) or 0:.4g} ms",
        )
    elif reading.itl_kind == "per_request_mean" and row.tpot_ms:
        yield c.find(
            "itl_is_request_mean",
            "info",
            "The inter-token latency is a mean over each request: stalls within a request do not show in its"
            " percentiles.",
            "Look at the gaps between chunks too.",
        )
    if reading.bundled_tokens_suspected:
        second = _mean(row.ttst_ms)
        shown = (
            f"the second token comes {second:.3g} ms after the first"
            if second is not None
            else "most gaps are near zero"
        )
        yield c.find(
            "tokens_bundled",
            "warning",
            f"Several tokens arrive at once ({shown}): client gaps are not the engine's time per token.",
            "Use TPOT over whole requests, and look at the server's stream interval.",
            shown,
        )
    if reading.input_vision_frac is not None and reading.input_vision_frac > 0.5:
        yield c.find(
            "mostly_vision_tokens",
            "info",
            f"{reading.input_vision_frac:.0%} of the input tokens are image tokens.",
            "Do not compare the input rate with a text benchmark.",
            f"{row.input_vision_tokens} of {row.input_tokens}",
        )
    if row.decode_tokens_per_s is not None and row.wall_tokens_per_s is not None:
        yield c.find(
            "two_throughputs",
            "info",
            "Two throughputs are given: over the whole request, and over decoding alone.",
            "Compare like with like.",
            f"wall {row.wall_tokens_per_s:.4g}, decode {row.decode_tokens_per_s:.4g} tok/s",
        )


def _arithmetic(c: _Context) -> Iterator[Finding]:
    row = c.row
    if row.format in ("sglang_one_batch", "runs_text", "table", "guidellm"):
        if row.format == "sglang_one_batch":
            yield c.find(
                "one_batch_definition",
                "info",
                "Output throughput counts all output tokens over the time after the last first token; it is one batch,"
                " not a served load.",
                "Do not compare it with bench_serving.",
                source="sglang/benchmark/one_batch_server.py",
            )
        return
    for name, shown, derived in _contradicted_rates(c.row):
        yield c.find(
            "throughput_inconsistent",
            "error",
            f"{name} is {shown:g}, but count and duration give {derived:.5g}.",
            "Use neither until it is explained.",
            name,
        )
    if c.reading.tpot_consistent is False:
        yield c.find(
            "tpot_inconsistent",
            "warning",
            f"TPOT x throughput means {c.reading.concurrency_decoding:.4g} requests decoding at once, which does"
            " not fit the"
            " concurrency.",
            "One of the two is measured differently.",
            f"TPOT {_mean(row.tpot_ms) or 0:.4g} ms x {row.output_tokens_per_s:.5g} tok/s",
        )


def _client(c: _Context) -> Iterator[Finding]:
    row = c.row
    streams = row.max_concurrency or row.peak_concurrency or row.concurrency or 0
    if c.reading.client_bound_suspected:
        yield c.find(
            "client_bound_suspected",
            "warning",
            f"{row.tool} on one core did not keep up at this load when it was measured: throughput too low, TTFT"
            " too high.",
            "Measure the client's own delay, or use several clients.",
            f"{row.output_tokens_per_s or 0:.5g} tok/s, {streams:g} streams",
            "comparison of ten clients, one core, Nov 2026",
        )
    elif streams >= CLIENT_STREAMS_NOTED and row.tool in (
        "sglang.bench_serving",
        "vllm bench serve",
        "aiperf",
        "guidellm",
    ):
        yield c.find(
            "client_adds_latency",
            "info",
            f"At {streams:g} streams a Python client's TTFT was 20 to 40 ms too high.",
            "Subtract nothing; measure the client.",
            f"{streams:g} streams",
            "comparison of ten clients, one core, Nov 2026",
        )
    if row.client_queue_ms and (_mean(row.client_queue_ms) or 0) > 10:
        yield c.find(
            "client_queue",
            "warning",
            f"Requests waited {_mean(row.client_queue_ms):.4g} ms in the client, outside every latency.",
            "Raise the client's limit.",
        )


def _shortness(c: _Context) -> Iterator[Finding]:
    row = c.row
    if (
        row.completed
        and row.max_concurrency
        and row.max_concurrency > 1
        and row.completed <= 2 * row.max_concurrency
        and row.format != "sglang_one_batch"
    ):
        yield c.find(
            "mostly_ramp",
            "warning",
            f"{row.completed} requests at concurrency {row.max_concurrency}: ramp and drain are as long as the"
            " steady part.",
            "Send at least 5 requests per stream.",
            f"{row.completed} requests",
        )
    elif row.duration_s is not None and row.duration_s < 10 and row.format not in ("sglang_one_batch", "runs_text"):
        yield c.find(
            "short_run",
            "info",
            f"The run took {row.duration_s:.3g} s: its duration contains start and end, some percent of it.",
            "Run it for a minute.",
        )
    if c.reading.first_wave_ttft_ratio is not None and c.reading.first_wave_ttft_ratio > 2:
        yield c.find(
            "first_wave_slow",
            "warning",
            f"The first wave's TTFT is {c.reading.first_wave_ttft_ratio:.3g} times that of the others: warming up"
            " is part of the"
            " measurement.",
            "Warm up with requests of full length first.",
            f"{len(c.details.ttfts_s)} TTFTs",
        )
    if c.row.format == "runs_text":
        if c.reading.warmup_excluded is False:
            yield c.find(
                "warmup_included",
                "warning",
                "The summary's means contain the warm-up runs.",
                "Leave them out.",
                str(c.details.summary),
            )
        elif not c.details.warmup_runs:
            yield c.find("no_warmup", "info", "No warm-up run is shown.", "The first run may be slower.")
        for key, mean in c.details.summary.items():
            alone = c.details.runs_mean.get(key)
            if (
                alone is not None
                and abs(mean - alone) > 0.01 * abs(alone) + 0.01
                and c.reading.warmup_excluded is not False
            ):
                yield c.find(
                    "summary_differs",
                    "warning",
                    f"The summary says {key} {mean:g}, the runs shown give {alone:.5g}.",
                    "Some runs are not shown.",
                    key,
                )


def _speculation(c: _Context) -> Iterator[Finding]:
    row = c.row
    if row.accept_length is None:
        return
    if row.format in ("sglang_jsonl", "sglang_text"):
        yield c.find(
            "accept_length_is_cumulative",
            "info",
            f"Accept length {row.accept_length:.3g} contains the bonus token, and is the server's average since"
            " its start or last"
            " flush, not this run's.",
            "Sum completion_tokens over spec_verify_ct of this run's answers.",
            f"accept_length {row.accept_length:.4g}",
            "sglang/benchmark/serving.py",
        )
    if row.dataset in ("random-ids", "random_ids"):
        yield c.find(
            "acceptance_on_random_ids",
            "warning",
            "The acceptance was measured on random token ids: on real text it is another one.",
            "Measure on text of the real use.",
            row.dataset,
        )


def _secrets(c: _Context) -> Iterator[Finding]:
    if c.details.secrets:
        yield c.find(
            "secret_in_file",
            "warning",
            "The file contains the server's arguments with an API key or password in them.",
            "Remove it before sharing the file, and change the key.",
            "server_info",
        )
    elif c.details.server_info:
        yield c.find(
            "server_info_embedded",
            "info",
            "The file contains all of the server's arguments, also paths and host names.",
            "Look at it before sharing the file.",
            "server_info",
        )
    if c.details.odd_keys:
        yield c.find(
            "odd_key",
            "info",
            f"The file's keys have stray characters: {', '.join(c.details.odd_keys[:5])}.",
            "Read them without.",
            c.details.odd_keys[0],
        )


#: Every rule; a new one is a new function and its name here.
RULES: tuple[Rule, ...] = (
    _failures,
    _faults,
    _rate,
    _length,
    _latency,
    _arithmetic,
    _client,
    _shortness,
    _speculation,
    _secrets,
)
