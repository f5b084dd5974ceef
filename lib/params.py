"""Parameters: `params/<profile>/profile.yaml` says which server, `params/<profile>/NN.yaml` what notebook NN does with it.

Every file is checked whole before anything runs: unknown keys are named with the nearest known one, wrong types with
what was expected, all faults in one message. Values are frozen afterwards.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from lib.errors import BadParams
from lib.server.redact import is_secret_name

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS: dict[str, str] = {
    "01": "01_build",
    "02": "02_backend_sweep",
    "03": "03_benchmark",
    "04": "04_speculative_nextn",
    "05": "05_kv_audit",
    "06": "06_deploy",
}
FlagValue = bool | int | float | str | list[str | int | float] | None


class _Params(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class ServerParams(_Params):
    """One server: what to launch (or which running one to attach to) and how long to wait for it."""

    attach: str | None = Field(default=None, description="URL of a running server that the workbook did not launch")
    log: str | None = Field(default=None, description="log file of an attached server, if it can be read here")
    model: str | None = Field(default=None, description="folder of the checkpoint, or the name of an embedded model")
    served_model_name: str | None = None
    python: str = Field(default=".venv-sglang/bin/python", description="interpreter that has SGLang installed")
    sglang_version: str | None = Field(default=None, description="None: asked from that interpreter")
    flags: dict[str, FlagValue] = {}
    environment: dict[str, str] = {}
    host: str = "127.0.0.1"
    port: int | None = Field(default=None, ge=1, le=65535, description="None: a free port")
    ready_timeout_s: float = Field(default=600.0, gt=0)
    stop_timeout_s: float = Field(default=20.0, gt=0)
    keep: bool = Field(default=False, description="leave the server running when the workbook is gone")
    api_key_env: str | None = Field(default=None, description="name of the environment variable with the API key")


class HostParams(_Params):
    """Where the server runs: this machine, a host that plain `ssh` reaches without asking, or a container below a hypervisor."""

    kind: Literal["local", "ssh", "lxc"] = "local"
    address: str | None = Field(default=None, description="ssh: HOST, USER@HOST or a name of ~/.ssh/config")
    port: int | None = Field(default=None, ge=1, le=65535, description="ssh: its port")
    identity: str | None = Field(default=None, description="ssh: file of the private key; None: as ssh chooses")
    config: str | None = Field(default=None, description="ssh: another configuration file than ~/.ssh/config")
    container: int | None = Field(default=None, ge=1, description="lxc: the container's number")
    hypervisor: HostParams | None = Field(default=None, description="lxc: where `pct` runs")
    python: str = Field(default="python3", description="an interpreter there, 3.7 or newer, for everything but load")
    sudo: bool = Field(default=True, description="use `sudo -n` for what takes root (owners of ports, logs of others)")
    load_client: Literal["host", "here"] = Field(
        default="host", description="where load is sent from: beside the server, or here through a forwarded port"
    )
    silence_s: float = Field(
        default=60.0, ge=5, description="a launched server ends by itself so long after the last word from here"
    )
    client_python: str | None = Field(
        default=None, description="an interpreter there, 3.11 or newer, for the load client; None: server.python, else python"
    )

    @model_validator(mode="after")
    def _keys_fit_the_kind(self) -> HostParams:
        of_kind = {"ssh": ("address", "port", "identity", "config"), "lxc": ("container", "hypervisor")}
        needed = {"ssh": ("address",), "lxc": ("container", "hypervisor")}.get(self.kind, ())
        faults = [f"kind {self.kind} needs {name}" for name in needed if getattr(self, name) is None]
        faults += [
            f"{name} belongs to kind {kind}, not to {self.kind}"
            for kind, names in of_kind.items()
            for name in names
            if kind != self.kind and getattr(self, name) is not None
        ]
        if faults:
            raise ValueError("; ".join(faults))
        return self

    @property
    def remote(self) -> bool:
        return self.kind != "local"


class KnownAnswer(_Params):
    """A greedy prompt whose continuation is known; `expect` None where the model is too small to know anything."""

    prompt: str = "The capital of France is"
    expect: str | None = " Paris"
    max_new_tokens: int = Field(default=8, ge=1)


class Profile(_Params):
    """profile.yaml: the server that all six notebooks speak of, and published figures to compare with."""

    title: str
    host: HostParams = Field(default=HostParams(), description="where the server runs; `server` is as seen from there")
    server: ServerParams
    known_answer: KnownAnswer = KnownAnswer()
    reference: dict[str, Any] = Field(default={}, description="published numbers, each with its source")


class NotebookParams(_Params):
    """What every notebook takes; `server` and `known_answer` override the profile's keys one by one."""

    profile: str = "embedded"
    server: dict[str, Any] = {}
    known_answer: dict[str, Any] = {}


class BuildParams(NotebookParams):
    """01: which GPU the kernels are judged for, and whether sgl-kernel is built from source."""

    compute_capability: str | None = Field(default=None, description="'9.0' or 'SM120'; None: the host's GPUs")
    build_from_source: bool = Field(default=False, description="run the plan of a source build (an hour and more)")
    source_ref: str | None = Field(default=None, description="tag or branch; None: v and the installed SGLang's version")
    source_commit: str | None = Field(default=None, description="the commit that it must be")


class Candidate(_Params):
    """One row of the sweep: flags and environment on top of the profile's; perhaps another environment or checkpoint."""

    id: str = Field(pattern=r"^[A-Za-z0-9_=+-][A-Za-z0-9_.=+-]*$", max_length=120)
    flags: dict[str, FlagValue] = {}
    environment: dict[str, str] = {}
    python: str | None = Field(default=None, description="interpreter of another SGLang; None: the profile's")
    model: str | None = Field(
        default=None, description="another checkpoint with the same tokenizer; None: the profile's"
    )
    ready_timeout_s: float | None = Field(default=None, gt=0)
    quiet_timeout_s: float | None = Field(default=None, gt=0, description="None: the sweep's")
    compile_timeout_s: float | None = Field(default=None, gt=0, description="None: the sweep's")

    @field_validator("id")
    @classmethod
    def _not_a_folder_of_the_run(cls, value: str) -> str:
        if value in ("servers", "documents", "checkpoint", "host", "calibration", "holders", "expected"):
            raise ValueError(f"{value!r} names a folder of the run; choose another id")
        return value


class Link(_Params):
    """A trial that has all of `when` also gets these flags and variables: a backend that only runs with another flag."""

    when: dict[str, FlagValue] = Field(min_length=1)
    flags: dict[str, FlagValue] = {}
    environment: dict[str, str] = {}
    why: str = Field(min_length=1)


class Exclusion(_Params):
    """A trial that has all of `when` is left out, and the table says why."""

    when: dict[str, FlagValue] = Field(min_length=1)
    why: str = Field(min_length=1)


class SweepParams(NotebookParams):
    """02: which trials (a list, a grid, or both), what each is compared with, and when waiting for one ends."""

    reference: str = Field(default="torch_native", description="id of the trial that the others are compared with")
    candidates: list[Candidate] = Field(
        default=[], description="named trials: id, flags, environment; also python, model and deadlines of their own"
    )
    axes: dict[str, list[FlagValue]] = Field(
        default={},
        description="a grid: a flag, an axis of docs/backends.md, or env:NAME, and its values; null: as the profile",
    )
    cross: bool = Field(default=True, description="False: only one axis away from the reference at a time")
    links: list[Link] = Field(default=[], description="flags and variables that a trial with all of `when` also gets")
    exclude: list[Exclusion] = Field(
        default=[], description="trials with all of `when` are left out, and listed with `why`"
    )
    verify: Literal["none", "all"] | list[str] = Field(
        default="none",
        description="trials that this version is known to refuse or ignore are launched all the same: all, or by id",
    )
    text_tokens: int = Field(default=512, ge=64, description="tokens of real text in the longest scored piece")
    limit_nats: float = Field(
        default=0.05, gt=0, description="largest mean |log-probability difference| that still counts as equal"
    )
    garbage_nats: float = Field(default=1.0, gt=0, description="from this mean difference on it is garbage")
    load_concurrency: int = Field(default=8, ge=2, description="requests in flight in the gate under load")
    load_rounds: int = Field(default=2, ge=1, description="how often each piece of text is scored under load")
    speed_concurrency: int = Field(default=4, ge=1, description="streams of the short benchmark")
    speed_input_len: int = Field(default=128, ge=1, description="tokens of its prompts (real code)")
    speed_output_len: int = Field(default=32, ge=2, description="tokens that each request generates")
    speed_repeats: int = Field(default=3, ge=0, description="levels in one launch, for the interval; 0: no benchmark")
    quiet_timeout_s: float = Field(default=180.0, gt=0, description="no line and no compiler at work: it hangs")
    compile_timeout_s: float = Field(default=1200.0, gt=0, description="no line but kernels are being compiled")
    answer_timeout_s: float = Field(default=120.0, gt=0, description="a request without an answer: it hangs")
    gpus: list[int] | None = Field(default=None, description="indices of the GPUs that may be used; None: all")
    may_stop: list[str] = Field(
        default=[], description="processes that may be ended before the first launch, as pid:start_time[:ticks]"
    )
    kernel_cache: str | None = Field(
        default=None, description="folder for compiled kernels of all trials; None: SGLang's own, shared as well"
    )


class BenchmarkParams(NotebookParams):
    """03: the levels, the context depths and what is sent."""

    concurrency: list[Annotated[int, Field(ge=1)]] = Field(min_length=1)
    num_requests: int | None = Field(default=None, ge=1, description="per level; None: max(4, 2C)")
    repeats: int = Field(default=1, ge=1, description="of every level, interleaved: A B C A B C")
    dataset: Literal["code", "chat", "random_ids", "repeating"] = "code"
    input_len: int = Field(default=256, ge=1)
    output_len: int = Field(default=64, ge=1)
    api: Literal["generate", "completions", "chat"] = "completions"
    vocab_size: int | None = Field(default=None, ge=2, description="for random_ids where config.json can't be read")
    seed: int = 42
    depths: list[Annotated[int, Field(ge=16)] | Literal["limit"]] = Field(
        default=[], description="context depths in tokens; `limit`: the deepest that the server accepts"
    )
    depth_requests: int = Field(default=3, ge=1, description="at each depth; at least as many as users at once")
    depth_output_len: int = Field(default=32, ge=2)
    depth_suffix_len: int = Field(default=64, ge=1, description="new tokens after a prefix that is in the cache")
    agents: int = Field(default=1, ge=1, description="agents at once, beside one user, on the axis of depth")
    budget_s: float | None = Field(
        default=None, gt=0, description="no level begins later than this after the first, no depth after the first depth"
    )
    bench_serving: list[Annotated[int, Field(ge=1)]] = Field(
        default=[], description="levels at which sglang.bench_serving sends the same requests to the same server beside this client"
    )
    bench_serving_repeats: int = Field(default=2, ge=1, description="of each pair; who goes first changes")
    smoke_prompt: str = "Write a Python function that merges two sorted lists."
    smoke_tokens: int = Field(default=128, ge=2)
    gap_timeout_s: float = Field(
        default=120.0, gt=0, description="a stream in which no byte comes for longer has failed"
    )
    bandwidth_bytes_per_s: float | None = Field(
        default=None, gt=0, description="of one device; None: the GPU's row of the table, or measured on a CPU"
    )
    flops_per_s: float | None = Field(
        default=None, gt=0, description="dense 16-bit, of one device; None: as for the bandwidth"
    )
    active_weight_bytes: float | None = Field(
        default=None,
        gt=0,
        description="weights that a decode step reads on one device at C=1; None: from the checkpoint's headers",
    )
    allreduce_latency_s: float | None = Field(default=None, ge=0, description="of one all-reduce; None: the table's")
    interconnect_bytes_per_s: float | None = Field(
        default=None, gt=0, description="one direction of one device; None: by `nvidia-smi topo -m`"
    )


class Expected(_Params):
    """What is expected of speculation before anything is measured; costs are in plain decode steps."""

    accept_length: dict[str, float] = Field(description="tokens of a verification step, by kind of text")
    verify_cost: float = Field(gt=0, description="one verification, in plain decode steps at one request")
    draft_cost: float = Field(ge=0, description="all drafts before one verification, in plain decode steps")
    source: str


class SpeculativeParams(NotebookParams):
    """04: the treatment, how it is measured against its absence, and recorded runs for hosts that can't run it."""

    flags: dict[str, FlagValue] = {"speculative_algorithm": "NEXTN"}
    environment: dict[str, str] = {}
    launches: int = Field(default=2, ge=1, le=10, description="of each arm, in the order A B B A")
    texts: list[Literal["code", "chat", "random_ids", "repeating"]] = Field(
        default=["code", "chat", "random_ids", "repeating"],
        min_length=1,
        description="the first one also gives the cost of a step at every concurrency",
    )
    concurrency: list[int] = Field(default=[1, 4, 16], min_length=1)
    num_requests: int | None = Field(default=None, ge=2, description="per level; None: max(8, 2C)")
    input_len: int = Field(default=128, ge=1)
    output_len: int = Field(default=128, ge=2)
    sentence: str | None = Field(
        default=None, min_length=1, description="what the repeating text repeats; None: short sentences of its own"
    )
    ignore_eos: bool = Field(
        default=False, description="true: equal lengths, but text after the end of a text repeats itself"
    )
    seed: int = 42
    no_difference_frac: float = Field(default=0.05, gt=0, lt=1, description="x of 'no difference within x%'")
    answers: int = Field(default=4, ge=1, description="greedy answers of each text that are compared token by token")
    tie_nats: float = Field(default=0.1, gt=0, description="two tokens closer than this are a near tie")
    samples: int = Field(default=32, ge=0, description="sampled answers of each launch; 0: none")
    long_run_requests: int = Field(default=8, ge=0, description="requests of the long run; 0: none")
    long_run_len: int = Field(default=512, ge=64)
    gap_timeout_s: float = Field(default=120.0, gt=0)
    expected: Expected | None = None
    recorded: str | None = "tests/recorded/h200-sglang-0.5.16"
    published: str | None = Field(
        default=None, description="profile whose reference tables are judged; None: this profile's own"
    )

    @field_validator("concurrency")
    @classmethod
    def _levels(cls, value: list[int]) -> list[int]:
        if min(value) < 1 or sorted(set(value)) != value:
            raise ValueError("different levels of at least 1, in rising order")
        return value


class ArmParams(_Params):
    """One more arm of 05: flags, environment and edits of the checkpoint (in a copy) on top of the reference's."""

    id: str = Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.=+-]*$")
    flags: dict[str, FlagValue] = {}
    environment: dict[str, str] = {}
    checkpoint: list[Literal["fp8_kv_declared", "kv_scales_added", "kv_scales_removed", "kv_cache_quant_algo_null"]] = []


class NumericsParams(_Params):
    """What the precision numerics of 05 compute, without a server: keys of `lib.model.precision_job.REQUEST`, None for its default."""

    device: str = "cpu"
    keys: list[int] | None = Field(default=None, min_length=1, description="context lengths of the made data")
    kinds: list[str] | None = Field(default=None, description="kinds of made data (lib.model.precision.KINDS)")
    arms: list[tuple[str, str, str]] | None = Field(default=None, description="[format, path, scale: one or calibrated]")
    draws: int | None = Field(default=None, ge=1, description="independent draws; from 3 on there is an interval")
    queries: int | None = Field(default=None, ge=1)
    head_dim: int | None = Field(default=None, ge=16)
    logit_std: float | None = Field(default=None, gt=0)
    num_kv_splits: int | None = Field(default=None, ge=1)
    seed: int | None = None
    checkpoint: bool = Field(default=True, description="also the K, V and queries that the profile's model makes of a text")
    layers: list[int] | None = Field(default=None, description="layers whose attention is computed; None: all")
    tokens: int | None = Field(default=None, ge=64, description="tokens of its text; None: the longest of keys")
    positions: int | None = Field(default=None, ge=1, description="last positions whose queries are taken")
    document: str = Field(default="argparse", description="the text: a module of the standard library, or a file")

    def request(self, model: str | None) -> dict[str, Any]:
        """Only what was said, as the job takes it."""
        said = self.model_dump(exclude={"checkpoint", "document"}, exclude_none=True)
        return {**said, "checkpoint": model} if self.checkpoint and model else said


class AuditParams(NotebookParams):
    """05: which KV cache dtypes and other arms are compared, on which text and tasks, against which limits."""

    kv_cache_dtypes: list[str] = Field(
        default=["bf16", "fp8_e4m3"], min_length=1, description="the first one is the reference"
    )
    arms: list[ArmParams] = Field(
        default=[], description="further arms: mamba_ssm_dtype, chunked_prefill_size, a backend, an edited checkpoint"
    )
    documents: list[str] = Field(
        default=["argparse", "typing", "tarfile"],
        min_length=1,
        description="modules of the standard library, or text files, joined by + to longer texts",
    )
    document_tokens: int | list[int] = Field(
        default=2000, description="length of every document, or one length for each (several depths)"
    )
    bucket_tokens: int = Field(default=500, ge=16)
    bucket_doubling: bool = False
    limit_nats: float = Field(
        default=0.01, gt=0, description="largest mean loss of log-probability per token that is accepted"
    )
    top_logprobs: int = Field(default=5, ge=0, le=64, description="likeliest tokens kept for top-1 agreement and KL")
    floor_documents: int = Field(default=2, ge=1, description="documents of the reference's floor passes: again, restarted, loaded")
    load_streams: int = Field(default=2, ge=0, description="requests that run beside the loaded pass; 0: no such pass")
    restart_reference: bool = Field(default=True, description="launch the reference once more: floor across restarts")
    chunked_prefill_size: int | None = Field(
        default=None,
        ge=16,
        description="prefill chunk of every arm; tokens of the first chunk read no KV pool on most backends",
    )
    task_items: int = Field(default=0, ge=0, description="items of each task family; 0: no tasks")
    task_tokens: int = Field(default=2000, ge=240, description="depth of the deep items")
    probe_documents: int = Field(default=1, ge=0, le=32, description="texts of the cache probe on each arm; 0: no probe")
    probe_limit_nats: float = Field(default=0.05, gt=0, description="accepted cost of reading from the cache, by the probe")
    numerics: NumericsParams | None = Field(
        default=None, description="precision numerics by context length, on made data and the model's own K and V; None: none"
    )
    cost_requests: int = Field(default=0, ge=0, description="requests of the throughput measurement of each arm; 0: none")
    cost_concurrency: int = Field(default=4, ge=1)
    cost_input_len: int = Field(default=128, ge=1)
    cost_output_len: int = Field(default=32, ge=2)
    needed_tokens: int | None = Field(
        default=None, ge=1, description="tokens that the deployment must hold at once; None: one full context"
    )
    limit_throughput_frac: float = Field(default=0.1, gt=0, lt=1, description="largest accepted loss of throughput")

    @field_validator("arms")
    @classmethod
    def _ids_are_unique(cls, value: list[ArmParams]) -> list[ArmParams]:
        ids = [arm.id for arm in value]
        if len(set(ids)) != len(ids):
            raise ValueError(f"arms need unique ids, found {ids}")
        return value

    @field_validator("document_tokens")
    @classmethod
    def _long_enough(cls, value: int | list[int]) -> int | list[int]:
        if not value or min(value if isinstance(value, list) else [value]) < 64:
            raise ValueError("documents have at least 64 tokens")
        return value


class ContainerParams(_Params):
    """06: the server runs in a container; `server.model` and other paths are the host's and mounted at the same place."""

    image: str = Field(
        pattern=r"^[a-z0-9][a-zA-Z0-9._:/-]{0,250}@sha256:[0-9a-f]{64}$", description="repository@sha256:digest"
    )
    python: str = Field(default="python3", description="the interpreter in the image")
    volumes: list[tuple[str, str]] = Field(default=[], description="[host path, container path], read-only")
    cache_volumes: list[tuple[str, str]] = Field(default=[], description="[host path, container path], writable")
    docker: str = Field(default="/usr/bin/docker", description="the engine's command on the host")


class DeployParams(NotebookParams):
    """06: the service that is rendered and proven; installed only where `deploy` says so."""

    service: str = Field(default="sglang", pattern=r"^[A-Za-z0-9_.@-]+$")
    user: str = "sglang"
    working_directory: str = "/var/lib/sglang"
    description: str = "SGLang server"
    goal: str = "Serve the model with a KV cache whose precision was chosen, not inherited."
    port: int | None = Field(default=None, ge=1, le=65535, description="of the service; None: server.port, else 30000")
    container: ContainerParams | None = Field(default=None, description="run the server in a container")
    deploy: bool = Field(default=False, description="really deploy to the profile's host; False: only the plan is shown")
    overrides: dict[str, str] = Field(default={}, description="objections that do not hold, each with its reason")
    context_tokens: int | None = Field(default=None, ge=1, description="the longest request that the service must take")
    concurrent_requests: int | None = Field(
        default=None, ge=1, description="requests of context_tokens that the KV pool must hold at once"
    )
    environment_file: bool = Field(
        default=False, description="the unit reads /etc/SERVICE.env, root's, written by `workbook deploy --environment-file`"
    )
    hypervisor: HostParams | None = Field(
        default=None, description="kind lxc: another way to the host, where its sshd or a process does not answer any more"
    )
    restart_proof: bool = Field(default=True, description="crash it once after the proof, and prove that it comes back")


MODELS: dict[str, type[NotebookParams]] = {
    "01": BuildParams,
    "02": SweepParams,
    "03": BenchmarkParams,
    "04": SpeculativeParams,
    "05": AuditParams,
    "06": DeployParams,
}


def profile_folder(profile: str) -> Path:
    """Folder of a profile: a name under params/ or under WORKBOOK_PROFILES (cells of a matrix), or a folder anywhere.

    Raises:
        BadParams: there is none; names the known ones.
    """
    made = os.environ.get("WORKBOOK_PROFILES")
    for folder in (ROOT / "params" / profile, *([Path(made) / profile] if made else []), Path(profile)):
        if (folder / "profile.yaml").is_file():
            return folder
    known = sorted(p.parent.name for p in (ROOT / "params").glob("*/profile.yaml"))
    near = difflib.get_close_matches(profile, known, 1)
    raise BadParams(
        f"a profile named {profile!r} (a folder with profile.yaml)",
        f"known: {', '.join(known)}",
        f"did you mean {near[0]!r}?" if near else "name one of them, or a folder",
    )


def read_yaml(path: Path) -> dict[str, Any]:
    """One YAML mapping; BadParams with line and column if it is not one."""
    try:
        data = yaml.load(path.read_text(encoding="utf-8"), Loader=_UniqueKeys)  # a SafeLoader
    except OSError as error:
        raise BadParams(f"a readable file {path}", error.strerror) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise BadParams(f"{path} is YAML", " ".join(str(error).split())) from error
    if not isinstance(data, dict):
        raise BadParams(f"{path} is a mapping of parameters", type(data).__name__)
    return data


class _UniqueKeys(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice: the second would silently win."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            key = str(self.construct_object(key_node))
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is given twice", key_node.start_mark)
            seen.add(key)
        return dict(super().construct_mapping(node, deep=deep))


def validated(model: type[BaseModel], data: Mapping[str, Any], where: str) -> Any:
    """`data` as a frozen `model`; BadParams lists every fault at once, unknown keys with the nearest known one."""
    try:
        return model.model_validate(dict(data))
    except ValidationError as error:
        faults = [_fault(model, e) for e in error.errors()]
        raise BadParams(f"{where} is valid", "; ".join(faults), "correct these keys") from error


def _fault(model: type[BaseModel], error: Any) -> str:
    path = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        known = _fields_at(model, error["loc"][:-1])
        near = difflib.get_close_matches(str(error["loc"][-1]), known, 1, 0.5)
        hint = f", did you mean {near[0]!r}?" if near else f", known: {', '.join(known)}"
        return f"unknown key {path!r}{hint}"
    value = repr(error.get("input"))
    return f"{path or 'the file'}: {error['msg'][0].lower()}{error['msg'][1:]}, found {value[:80]}"


def _fields_at(model: Any, loc: tuple[Any, ...]) -> list[str]:
    for part in loc:
        if isinstance(part, int):
            continue
        field = getattr(model, "model_fields", {}).get(part)
        inner = list(getattr(field.annotation, "__args__", ()) if field else ()) + ([field.annotation] if field else [])
        model = next((a for a in inner if isinstance(a, type) and issubclass(a, BaseModel)), model)
    return list(getattr(model, "model_fields", {}))


def load_profile(
    profile: str,
    server: Mapping[str, Any] | None = None,
    known_answer: Mapping[str, Any] | None = None,
    source: Path | None = None,
) -> Profile:
    """The profile, with the notebook's `server` and `known_answer` keys laid over it (flags and environment key by key).

    `source` names its file where it is not the profile's own (a run's copy, for rebuilding).
    """
    path = source or profile_folder(profile) / "profile.yaml"
    data = read_yaml(path)
    base = dict(data.get("server") or {})
    for key, value in (server or {}).items():
        merge = key in ("flags", "environment") and isinstance(value, Mapping)
        base[key] = {**(base.get(key) or {}), **value} if merge else value
    data["server"] = base
    data["known_answer"] = {**(data.get("known_answer") or {}), **(known_answer or {})}
    loaded: Profile = validated(Profile, data, f"{path} with the notebook's server keys")
    refuse_secrets(loaded.server, str(path))
    if loaded.server.attach is None and loaded.server.model is None:
        raise BadParams(
            "server.model (a checkpoint folder) or server.attach (the URL of a running server)",
            "neither",
            f"edit {path}",
        )
    return loaded


def refuse_secrets(server: ServerParams, where: str) -> None:
    """Refuses secrets in parameters: files of a run carry them (notebooks, results, pages).

    Raises:
        BadParams: names the keys, never the values.
    """
    found = [f"flags.{name}" for name, value in server.flags.items() if value and is_secret_name(name)]
    found += [f"environment.{name}" for name, value in server.environment.items() if value and is_secret_name(name)]
    if server.attach and urlsplit(server.attach).username:
        found.append("attach (user and password in the URL)")
    if found:
        raise BadParams(
            f"no secret in {where}",
            f"secrets in {', '.join(found)}",
            "export them, and name the API key's variable in server.api_key_env",
        )


def load_notebook(profile: str, number: str) -> dict[str, Any]:
    """The parameters of one notebook as its file gives them, checked; `profile` is filled in.

    Raises:
        BadParams: missing file, bad YAML, unknown keys, wrong types.
    """
    path = profile_folder(profile) / f"{number}.yaml"
    data = read_yaml(path)
    named = str(data.setdefault("profile", profile))
    if named != profile and profile_folder(named).resolve() != profile_folder(profile).resolve():
        raise BadParams(
            f"{path} belongs to the profile it lies in",
            f"it says profile: {named}",
            f"write profile: {profile_folder(profile).name} there",
        )
    params = validated(MODELS[number], data, str(path))
    load_profile(params.profile, params.server, params.known_answer)
    return data


def notebook_params(number: str, namespace: Mapping[str, Any], strict: bool = True) -> Any:
    """The parameters that a running notebook has in its namespace (defaults of its cell, then papermill's), checked.

    Args:
        number: the notebook's number.
        namespace: its globals.
        strict: any other plain variable there is an unknown parameter (papermill injects it with a warning only) and is
            refused. False in a kernel that has run cells before: then variables of later cells are there too.
    """
    model = MODELS[number]
    hidden = {"In", "Out", "PAPERMILL_INPUT_PATH", "PAPERMILL_OUTPUT_PATH"}
    plain = {
        name: value
        for name, value in namespace.items()
        if not name.startswith("_")
        and name not in hidden
        and (strict or name in model.model_fields)
        and isinstance(value, (bool, int, float, str, list, dict, tuple, type(None)))
    }
    return validated(model, plain, f"the parameters of notebook {number}")


def sha256_of(params: BaseModel | Mapping[str, Any]) -> str:
    """Hash of a set of parameters, order of keys not counted."""
    data = params.model_dump(mode="json") if isinstance(params, BaseModel) else dict(params)
    return hashlib.sha256(json.dumps(data, sort_keys=True, default=str).encode()).hexdigest()
