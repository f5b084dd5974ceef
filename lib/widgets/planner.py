"""The capacity planner: what fits for any model, GPUs, dtypes, fraction and context, beside the server's own figure."""

from __future__ import annotations

from typing import Any

from lib.errors import BadInput
from lib.model.capacity import AS_STORED, WEIGHT_BITS, Plan, ServerFigure, Wanted, plan, plans_by_dtype, unlike
from lib.model.facts import Checkpoint
from lib.records import Evidence, Measured
from lib.report.tables import difference, table
from lib.results import NotebookRun, ServerHandle
from lib.server.flags import known_versions, nearest_release
from lib.widgets.panel import Control, Panel, Values, View, is_live
from lib.widgets.pictures import capacity
from lib.widgets.sources import checkpoint_of, first_wanted, server_figure, typed_checkpoint

TITLE = "Capacity planner"
#: KV cache dtypes that the picture compares, beside the chosen one.
COMPARED = ("bf16", "fp8_e4m3")


def capacity_planner(run: NotebookRun, handle: ServerHandle) -> Panel:
    """Shows the planner, first for the notebook's own server; a figure changes as a control moves.

    Every number is `lib.model.capacity.plan`'s (that is `memory.predict_pools`); the server's own is its /server_info.
    """
    server = server_figure(run, handle)
    own, where = checkpoint_of(run, handle)
    wanted = first_wanted(run, handle, server)

    def shown(values: Values) -> View:
        asked = asked_of(values, wanted)
        text = str(values["model"]).strip()
        if text == where and own is not None:
            checkpoint = own
        elif text:
            checkpoint = typed_checkpoint(text)
        else:
            raise BadInput("expected a model's folder, or a config.json", where or "nothing", "type its path")
        return planned(checkpoint, asked, server if text == where else None, server)

    panel = Panel(TITLE, controls_of(wanted, where if own is not None else ""), shown, is_live(run))
    panel.display()
    return panel


def controls_of(wanted: Wanted, model: str) -> list[Control]:
    """The planner's controls, at the notebook's own configuration; 0 means SGLang's default."""
    release, _ = nearest_release(wanted.sglang_version)
    form = release.find("kv_cache_dtype")
    dtypes = list(dict.fromkeys([*(form.choices if form and form.choices else ("auto",)), wanted.kv_cache_dtype]))
    versions = list(dict.fromkeys([*reversed(known_versions()), wanted.sglang_version]))
    fraction = wanted.mem_fraction_static
    return [
        Control("model", "model folder or config", model, help="a folder with config.json, or a config.json alone"),
        Control("tp", "GPUs (tensor parallel)", wanted.tp, "whole", low=1, high=1024),
        Control("memory_gib", "memory of one GPU, GiB", (wanted.gpu_memory_mib or 0) / 1024, "number", low=0, high=16384),
        Control("weights", "weights", AS_STORED, "choice", (AS_STORED, *WEIGHT_BITS)),
        Control("weights_gib", "weights on a GPU, GiB", 0.0, "number", low=0, high=16384, help="0: from the files"),
        Control("kv_cache_dtype", "kv_cache_dtype", wanted.kv_cache_dtype, "choice", tuple(dtypes)),
        Control("fraction", "mem_fraction_static", fraction or 0.0, "slider", low=0, high=0.99, step=0.001,
                help="0: SGLang's default"),
        Control("context", "context, tokens", wanted.context_length or 0, "whole", high=1 << 30, help="0: the model's"),
        Control("cap", "max_total_tokens", wanted.max_total_tokens or 0, "whole", high=1 << 40, help="0: no cap"),
        Control("running", "max_running_requests", wanted.max_running_requests or 0, "whole", high=1 << 20),
        Control("version", "SGLang", wanted.sglang_version, "choice", tuple(versions)),
    ]  # fmt: skip


def asked_of(values: Values, first: Wanted) -> Wanted:
    """The question that the controls ask."""

    def or_none(name: str) -> Any:
        return values[name] or None

    memory = or_none("memory_gib")
    return Wanted(
        tp=values["tp"],
        weights=values["weights"],
        weights_gib=or_none("weights_gib"),
        kv_cache_dtype=values["kv_cache_dtype"],
        mem_fraction_static=or_none("fraction"),
        context_length=or_none("context"),
        max_total_tokens=or_none("cap"),
        max_running_requests=or_none("running"),
        gpu_memory_mib=memory * 1024 if memory else None,
        sglang_version=values["version"],
        platform=first.platform,
    )


def planned(
    checkpoint: Checkpoint, wanted: Wanted, server: ServerFigure | None, other: ServerFigure | None = None
) -> View:
    """A plan as it is shown: the sentence, the table with the server's own figures, what the plan stands on, the picture.

    Args:
        checkpoint: the model.
        wanted: the question.
        server: the server of this model; None: there is none to compare with.
        other: a server of another model, to be named as such.
    """
    made = plan(checkpoint, wanted)
    differences = unlike(checkpoint, wanted, server) if server else []
    pools = made.pools
    context = pools.context_length
    plural = "" if made.requests == 1 else "s"
    fits = f"{made.requests:,} request{plural} of {context:,} tokens" if context else "requests unknown (no context)"
    sentence = (
        f"{checkpoint.architecture_name} on {wanted.tp} GPU{'s' if wanted.tp > 1 else ''}: {pools.max_total_num_tokens:,} "
        f"tokens of {pools.kv_cache_dtype} KV cache fit, {fits} at once. {_beside(made, server, other, differences)}"
    )
    figures = table(rows_of(made, server), ROW_COLUMNS, caption="Planned, and the server's own")
    notes = [
        pools.kv_cache_dtype_why,
        f"fraction: {pools.mem_fraction_from}",
        f"weights: {made.weights_why}",
        *pools.notes,
    ]
    basis = table([{"computed from": note} for note in notes], caption="What the plan stands on")
    others = plans_by_dtype(checkpoint, wanted, tuple(dict.fromkeys([wanted.kv_cache_dtype, *COMPARED])))
    return View(sentence, (figures, basis), capacity(made, others, server))


ROW_COLUMNS = ("what", "planned", "server's own", "difference", "evidence")


def rows_of(made: Plan, server: ServerFigure | None) -> list[dict[str, Any]]:
    """Each figure: planned, what the server says of itself, and the difference in percent of the planned one."""
    pools = made.pools
    whose = "no server has answered in this notebook" if server is None else "the server does not say"
    evidence = Evidence(path=server.path) if server else None
    pairs: list[tuple[str, Any, Any, str]] = [
        ("tokens in the KV pool", pools.max_total_num_tokens, server and server.tokens, "tokens"),
        ("KV cache bytes a token and GPU", pools.bytes_per_token, None, "B"),
        ("KV pool of one GPU", pools.kv_gib, server and server.kv_gib, "GiB"),
        ("weights on one GPU", made.weights_gib, server and server.weights_gib, "GiB"),
        ("context of one request", pools.context_length, server and server.context_length, "tokens"),
        ("requests of that context at once", made.requests, _requests(server), "requests"),
        ("requests that may run at once", pools.max_running_requests, server and server.running_requests, "requests"),
    ]
    rows = []
    for what, planned_value, own, unit in pairs:
        mine = Measured(value=planned_value, unit=unit, reason="computed" if planned_value is not None else "not known")
        theirs = Measured(
            value=own, unit=unit, n=1 if own is not None else None, reason="read once" if own is not None else whose
        )
        rows.append(
            {
                "what": what,
                "planned": mine,
                "server's own": theirs,
                "difference": difference(mine, theirs),
                "evidence": evidence if own is not None else None,
            }
        )
    return rows


def _requests(server: ServerFigure | None) -> int | None:
    if server is None or not server.tokens or not server.context_length:
        return None
    return server.tokens // server.context_length


def _beside(made: Plan, server: ServerFigure | None, other: ServerFigure | None, differences: list[str]) -> str:
    if server is None:
        return (
            f"The server {other.name} serves another model: nothing to compare."
            if other
            else "No server has answered here yet."
        )
    state = "running" if server.running else "last measured"
    if server.tokens is None:
        return f"The {state} server {server.name} does not say how many tokens it holds."
    off = server.tokens - made.pools.max_total_num_tokens
    than = f"{abs(off):,} {'more' if off > 0 else 'fewer'} than planned" if off else "as planned"
    text = f"The {state} server {server.name} holds {server.tokens:,} tokens, {than}"
    if differences:
        return f"{text}; it was asked otherwise ({'; '.join(differences)})."
    return f"{text}, with the same settings."
