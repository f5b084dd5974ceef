"""The widgets' pictures: a plan beside a server, an audit by its answers, verdicts by their evidence. In the report's look."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes

from lib.audit.rules import AuditReport
from lib.model.capacity import Plan, ServerFigure
from lib.records import Status
from lib.report.figures import COLOURS, INK, LIMIT_COLOUR, SOFT, Chart, _chart, _finished, _label, _limit_line, styled
from lib.report.tables import number_text


def capacity(plan: Plan, others: Mapping[str, Plan | None], server: ServerFigure | None) -> Chart:
    """Return one GPU's memory by what takes it, and tokens that fit by KV cache dtype, the server's own figure drawn.

    Args:
        plan: the plan that is asked for.
        others: the same question by KV cache dtype (None: can't be).
        server: what a server says; its tokens are a line across the bars.
    """
    words: list[str] = []
    with styled():
        figure = _chart(8.6, 2.6)
        left, right = figure.subplots(1, 2)
        words.append(_memory(left, plan))
        known = {name: one.pools.max_total_num_tokens for name, one in others.items() if one is not None}
        places = range(len(known))
        right.bar(
            places, list(known.values()), color=[COLOURS[0] if n == plan.wanted.kv_cache_dtype else SOFT for n in known]
        )
        right.set_xticks(list(places), [_label(name, 14) for name in known])
        for place, tokens in zip(places, known.values(), strict=True):
            right.annotate(number_text(tokens), (place, tokens), ha="center", va="bottom", fontsize=8, color=INK)
        highest = max([*known.values(), (server.tokens or 0) if server else 0, 1])
        words.append("tokens that fit: " + ", ".join(f"{name} {number_text(value)}" for name, value in known.items()))
        if server and server.tokens:
            _limit_line(right, server.tokens, f"server's own {number_text(server.tokens)}")
            words.append(f"the server's own {number_text(server.tokens)}")
        right.set_ylim(0, highest * 1.2)
        right.set_yticks([])
        right.set_title("Tokens that fit, by KV cache dtype")
    return _finished(figure, "Capacity planner. " + "; ".join(words) + ".")


def _memory(axes: Axes, plan: Plan) -> str:
    pools = plan.pools
    parts = {
        "weights": plan.weights_gib,
        "state": pools.state_gib,
        "KV pool": pools.kv_gib + pools.draft_kv_gib,
        "kept for the rest": pools.slack_gib,
    }
    known = {name: size for name, size in parts.items() if size}
    start = 0.0
    for index, (name, size) in enumerate(known.items()):
        axes.barh([0], [size], left=[start], color=COLOURS[index], label=f"{name} {size:.2f} GiB", height=0.5)
        start += size
    if plan.wanted.gpu_memory_mib:
        total = plan.wanted.gpu_memory_mib / 1024
        axes.axvline(total, color=LIMIT_COLOUR, linestyle=(0, (5, 3)), linewidth=1.1, label=f"total {total:.1f} GiB")
        known["total"] = total
    axes.set_yticks([])
    axes.set_ylim(-0.3, 1.7)
    axes.set_xlim(0, max(start, known.get("total", 0.0)) * 1.05 or 1)
    axes.legend(loc="upper left", fontsize=7, ncols=2)
    axes.set_title("Memory of one GPU (GiB)" if plan.wanted.platform != "cpu" else "Memory of the host (GiB)")
    return "memory of one GPU: " + ", ".join(f"{name} {size:.2f} GiB" for name, size in known.items())


def audit_answers(report: AuditReport | None, why: str = "") -> Chart:
    """Return how many accuracy rules answered what; `why` says why there is no audit."""
    counts: dict[str, int] = {}
    if report is not None:
        by_level = Counter(finding.level for finding in report.findings)
        counts = {level: by_level[level] for level in ("error", "warning", "info")}
        counts |= {
            "accepted": len(report.accepted_losses),
            "fine": len(report.fine),
            "not checked": len(report.not_checked),
        }
    return _counts(counts, "Accuracy rules by their answer", "Flag chooser", why or "no audit")


def evidence_by_verdict(counts: Mapping[str, int], statuses: Sequence[Status]) -> Chart:
    """Return how much of the quoted evidence stands where it was quoted, and how the verdicts went."""
    shown = dict(counts) | {f"verdict {status.value}": n for status, n in Counter(statuses).items()}
    return _counts(shown, "Evidence as it lies there now, and verdicts", "Evidence browser", "no verdict yet")


def _counts(counts: Mapping[str, int], title: str, widget: str, empty: str) -> Chart:
    with styled():
        figure = _chart(7.0, 0.5 + 0.24 * max(len(counts), 1))
        axes = figure.add_subplot()
        if not counts:
            axes.set_axis_off()
            axes.text(0.0, 0.5, _label(f"{title}: {empty}", 120), va="center", color=SOFT)
        else:
            names = list(counts)
            axes.barh(range(len(names)), list(counts.values()), color=COLOURS[0], height=0.6)
            axes.set_yticks(range(len(names)), [_label(name, 40) for name in names])
            axes.invert_yaxis()
            axes.set_xticks([])
            axes.set_xlim(0, max([*counts.values(), 1]) * 1.15)
            for place, count in enumerate(counts.values()):
                axes.annotate(f" {count}", (count, place), va="center", fontsize=8, color=INK)
            axes.set_title(title)
    told = ", ".join(f"{name} {count}" for name, count in counts.items()) or empty
    return _finished(figure, f"{widget}. {title}: {told}.")
