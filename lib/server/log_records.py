"""What `lib.server.log.read_log` gives: one record per log, every fact with its line number and the quoted line."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from lib.records import Record
from lib.server.failures import Failure

_SPECULATIVE_UNTOUCHED = "the target model verifies every draft token, so outputs stay the target's; only speed changes"


class Fact(Record):
    """Something that a log says, with the line that says it."""

    line_no: int
    line: str
    rank: str | None = Field(
        default=None, description="rank tags of the line, e.g. 'DP0 TP3'; None for one rank or the main process"
    )


class Told(Fact):
    """A line that says something by itself."""

    text: str = ""
    time: str | None = None


class Backend(Fact):
    """One choice of kernels: what was asked for and what is used."""

    kind: str = Field(description="SGLang's argument name, e.g. attention_backend")
    asked: str | None = Field(description="None: not known, or not asked for")
    taken: str | None = Field(description="None: not known from this log")
    known_by: str = Field(description="line | server_args | trace | not_known")
    changed: bool | None = Field(description="taken differs from asked; None if either is not known")


class Weights(Fact):
    """The weights that one rank loaded."""

    role: str = Field(description="target | draft")
    gib: float | None
    avail_gib: float | None
    seconds: float | None
    model_class: str | None
    dtype: str | None = None
    quant: str | None = None
    quant_algo: str | None = None
    fmt: str | None = None


class KvPool(Fact):
    """One KV cache pool of one rank."""

    role: str = Field(description="target | draft")
    label: str = Field(description="full | swa | the name that the log gives")
    label_known_by: str = Field(description="line | order | default")
    dtype: str | None
    dtype_known_by: str = Field(description="line | arithmetic | not_known")
    tokens: int
    k_gib: float | None
    v_gib: float | None
    kv_gib: float | None = Field(description="the size of a pool without a K and V part (MLA), or K + V")
    bytes_per_token: int | None = Field(
        description="the roundest value that the printed sizes allow; None if they are too coarse"
    )
    bytes_per_token_low: float | None
    bytes_per_token_high: float | None
    upper_bound: bool = Field(
        default=False, description="an address range is reserved; the pool is sized after graph capture"
    )


class PoolTotal(Fact):
    """A line that sums up pools of one rank: never a pool of its own."""

    gib: float
    swa_tokens: int | None = None
    full_tokens: int | None = None
    swa_full_ratio: float | None = None


class PoolPlan(Fact):
    """What the server computed before it allocated."""

    bytes_per_full_token: float | None = None
    budget_gib: float | None = None
    full_tokens: int | None = None
    swa_tokens: int | None = None
    available_gib: float | None = None
    total_gpu_gib: float | None = None
    mem_fraction_static: float | None = None


class MambaPool(Fact):
    """The recurrent-state pool of one rank."""

    slots: int
    conv_gib: float
    ssm_gib: float
    intermediate_ssm_gib: float | None = None
    intermediate_conv_gib: float | None = None
    total_gib: float
    draft_tokens: int | None = Field(
        default=None, description="speculative positions, from the ratio of the two ssm sizes"
    )


class Graph(Fact):
    """One CUDA graph capture of one rank."""

    name: str
    state: str = Field(description="begun | captured | disabled | failed")
    seconds: float | None = None
    gib: float | None = None
    avail_gib: float | None = None
    sizes: int | None = None
    reason: str | None = None


class Capacity(Fact):
    """The line that a scheduler prints when it is ready."""

    max_total_num_tokens: int | None = None
    chunked_prefill_size: int | None = None
    max_prefill_tokens: int | None = None
    max_running_requests: int | None = None
    context_len: int | None = None
    available_mem_gib: float | None = None
    memory: str | None = Field(default=None, description="gpu | cpu | npu | ...")


class Ready(Fact):
    """The line that says that the server answers."""

    time: str | None
    seconds_from_first_line: float | None


class PhaseSeen(Fact):
    """When a phase of the start began, and how long it took until the next one."""

    name: str
    time: str | None
    seconds: float | None


class Batch(Record):
    """One line about a batch. `None`: the line does not say it."""

    line_no: int
    time: str | None
    rank: str | None
    kind: str = Field(description="decode | prefill | engine (vLLM) | acceptance (a fragment)")
    running: int | None = None
    queue: int | None = None
    tokens: int | None = None
    usage: float | None = None
    full_tokens: int | None = None
    full_usage: float | None = None
    swa_tokens: int | None = None
    swa_usage: float | None = None
    mamba_num: int | None = None
    mamba_usage: float | None = None
    accept_len: float | None = None
    accept_rate: float | None = None
    graph: bool | None = None
    gen_tok_s: float | None = None
    input_tok_s: float | None = None
    new_seqs: int | None = None
    new_tokens: int | None = None
    cached_tokens: int | None = None
    pending_tokens: int | None = None


class Spread(Record):
    """All values of one quantity over the batch lines of one kind: exact, however many lines there were."""

    n: int
    low: float
    high: float
    mean: float
    last: float


class Batches(Record):
    """The batch lines: exact counts and spreads, and a series that is thinned out evenly when it grows too long."""

    decode_lines: int = 0
    prefill_lines: int = 0
    engine_lines: int = 0
    every: int = Field(default=1, description="the series holds every n-th line")
    series: list[Batch] = []
    spreads: dict[str, dict[str, Spread]] = Field(
        default={}, description="kind -> quantity -> spread; per line, not per time"
    )
    max_queue: int | None = None
    max_usage: float | None = None


class Speculation(Fact):
    """Speculative decoding as its lines show it, with the definition of their accept rate."""

    active: bool | None = Field(description="False if no draft token was ever accepted")
    lines: int
    last_accept_len: float | None
    last_accept_rate: float | None = Field(description="as printed; None in versions that print none")
    rate_definition: str = Field(
        description="drafts: (accept_len - 1) / num_steps, since 0.5.11 | tokens: accept_len / num_draft_tokens, "
        "until 0.5.10 | ambiguous | not_known"
    )
    num_steps: int | None = Field(
        default=None, description="drafts proposed per step: from the two numbers, or from server_args"
    )
    num_draft_tokens: int | None = None
    known_by: str = "not_known"
    drafts_accepted_per_step: float | None = Field(default=None, description="of the last line: accept_len - 1")
    draft_acceptance: float | None = Field(
        default=None, description="accepted drafts / proposed drafts of the last line, whatever was printed"
    )
    quality_affected: bool = False
    quality_why: str = _SPECULATIVE_UNTOUCHED
    throughput_affected: bool | None = Field(
        default=None, description="fewer than a quarter of the drafts are accepted"
    )
    trend_established: bool = Field(
        default=False, description="a log's windows mix prefill and decode: no trend follows from them"
    )
    rows: list[dict[str, float]] = Field(default=[], description="the first distinct pairs (len, rate)")


class VllmCapacity(Fact):
    """What vLLM says about its KV cache."""

    printed_tokens: int | None = None
    printed_concurrency: float | None = None
    max_model_len: int | None = None
    blocks: int | None = None
    block_size: int | None = None
    tokens: int | None = None
    fits: bool | None = None
    real_token_capacity: int | None = Field(default=None, description="printed_concurrency x max_model_len")
    consistent: bool | None = Field(
        default=None, description="tokens / max_model_len agrees with the printed concurrency"
    )
    kv_gib: float | None = None


class VllmSpeculation(Fact):
    """One `SpecDecoding metrics` line of vLLM."""

    mean_acceptance_length: float
    num_spec_tokens: int | None = None
    draft_acceptance: float | None = None
    accepted_tokens: int | None = None
    drafted_tokens: int | None = None
    consistent: bool | None = Field(default=None, description="1 + the sum of the per-position rates is the length")


class Notice(Fact):
    """A warning that matters, once, with how often and on which ranks it was seen."""

    id: str
    level: str = Field(description="info | low | medium | high | critical")
    text: str
    count: int = 1
    ranks: list[str] = []


class KvSummary(Record):
    """The KV cache of ONE rank (all ranks hold the same number of tokens; sizes are not summed over ranks)."""

    dtype: str | None
    dtype_known_by: str = Field(
        description="line | arithmetic (published checkpoints of this class have it) | not_known"
    )
    dtype_if_model_is: list[str] = Field(
        default=[], description="arithmetic: the published checkpoints that the pool sizes fit, all with this dtype"
    )
    tokens: int | None = Field(description="capacity: the target's tokens, once")
    target_gib_per_rank: float | None
    draft_gib_per_rank: float | None
    total_gib_per_rank: float | None
    ranks_seen: int
    ranks_differ: bool = False
    eight_bit_without_scales: bool | None = Field(
        default=None, description="an 8-bit cache, and no line says that scales were loaded"
    )


class Launch(Record):
    """One start of the server in this log."""

    line_no: int
    time: str | None
    ready: bool
    failure_class: str | None = None
    root_cause: str | None = None


class ServerLog(Record):
    """Everything that a server's log says about its last launch; see the module's docstring."""

    engine: str = Field(description="sglang | vllm | foreign | empty")
    engine_why: str
    foreign_program: str | None = None
    version: str | None = None
    version_known_by: str | None = Field(default=None, description="line | server_args | lines | not_known")
    version_at_least: str | None = None
    version_at_most: str | None = None
    version_evidence: list[str] = []
    lines: int = 0
    bytes: int = 0
    binary: bool = Field(default=False, description="the input holds bytes that no log has")
    first_time: str | None = None
    last_time: str | None = None
    ranks: list[str] = []
    tp_size: int | None = None
    pp_size: int | None = None
    dp_size: int | None = None
    ep_size: int | None = None
    command: Told | None = None
    asked_args: dict[str, str | bool] = Field(default={}, description="arguments on the command line in the log")
    server_args: dict[str, Any] = Field(default={}, description="resolved arguments, redacted")
    server_args_told: Told | None = None
    server_args_complete: bool | None = None
    model_class: str | None = None
    quantization: dict[str, str | None] = {}
    quantization_told: Told | None = None
    backends: list[Backend] = []
    weights: list[Weights] = []
    weights_gib_per_rank: float | None = Field(
        default=None,
        description="largest rank, target and draft; never summed over ranks; a rank with a value below 0 is left out",
    )
    slow_ranks: list[str] = Field(default=[], description="ranks that loaded their weights much later than the fastest")
    kv_pools: list[KvPool] = []
    pool_totals: list[PoolTotal] = []
    pool_plans: list[PoolPlan] = []
    mamba_pools: list[MambaPool] = []
    kv: KvSummary | None = None
    avail_after_pools_gib_min: float | None = None
    avail_after_target_pools_gib: float | None = None
    avail_before_graphs_gib: float | None = None
    last_avail_gib: float | None = None
    memory_of_parts_gib: dict[str, float] = Field(default={}, description="largest rank's GiB by what holds it")
    static_budget_gib: float | None = Field(
        default=None, description="mem_fraction_static x (weights + what was free after them)"
    )
    mem_fraction_floor: float | None = Field(
        default=None, description="below this fraction the weights alone fill the static budget"
    )
    graphs: list[Graph] = []
    graphs_enabled: bool | None = None
    capacity: Capacity | None = None
    slots_per_request: int | None = Field(default=None, description="recurrent-state slots per request")
    limited_by: str | None = None
    ready: Ready | None = None
    phase: str | None = Field(default=None, description="the last phase that a line shows")
    phases: list[PhaseSeen] = []
    batches: Batches = Batches()
    speculation: Speculation | None = None
    retractions: int = 0
    retracted_requests: int = 0
    retraction_told: Told | None = None
    http_lines: int = 0
    vllm_capacity: list[VllmCapacity] = []
    vllm_speculation: list[VllmSpeculation] = []
    notices: list[Notice] = []
    stopped: Told | None = None
    compiling: Told | None = None
    launches: list[Launch] = []
    failure: Failure | None = None
    cut_lines: int = Field(default=0, description="lines longer than 1 MiB, of which only the beginning was read")
    dropped_facts: int = Field(default=0, description="facts beyond the bound that were counted and not kept")

    @property
    def is_ready(self) -> bool:
        """Whether the log has the line that says so."""
        return self.ready is not None
