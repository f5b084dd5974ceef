"""A made-up run for tests of the pages: notebooks built without a kernel, records built by hand, some text hostile."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from lib.records import (
    Evidence,
    Measured,
    NotebookResult,
    NotebookState,
    Prediction,
    Provenance,
    RunResult,
    ServerIdentity,
    Status,
    Trial,
    Verdict,
)
from lib.report.figures import acceptance, difference_by_position, figure_svg, startup_phases, throughput_latency
from lib.report.tables import prediction_table, trial_table, verdict_table

RUN_ID = "20260301-120000-made-up"
HOSTILE = (
    "</pre><script>document.title='owned'</script>"
    "<img src=http://x.invalid/a.png onerror=alert(1)> \u202egnp.exe\x1b[2J"
)

TITLES = {
    "01": ("Build", "Does the server load the model and give a known answer?"),
    "02": ("Backend sweep", "Which attention backends work on this host, and how do the others fail?"),
    "03": ("Benchmark", "How many tokens per second does it serve, and how long does the first token take?"),
    "04": ("NEXTN", "Does speculative decoding help on this text?"),
    "05": ("KV audit", "Is the KV cache what the checkpoint and the flags say, and does it cost accuracy?"),
    "06": ("Deploy", "Is what runs on the host what was measured?"),
}


def interval(value: float, unit: str, share: float, n: int) -> Measured:
    """A measured value with an interval of plus and minus `share`."""
    width = abs(value) * share
    return Measured(value=value, unit=unit, n=n, low=value - width, high=value + width)


def identity(launch_id: str, **resolved: Any) -> ServerIdentity:
    """A launched server's identity."""
    return ServerIdentity(
        launch_id=launch_id,
        origin="launched",
        base_url="http://127.0.0.1:30000",
        pid=4242,
        pid_start_time=1_772_366_400.5,
        boot_id="0f0e0d0c",
        started="2026-03-01T12:00:05+00:00",
        ready_s=14.237,
        sglang_version="0.5.15.post1",
        argv=["python", "-m", "sglang.launch_server", "--model-path", "models/smol", "--device", "cpu"],
        environment={"SGLANG_USE_CPU_ENGINE": "1"},
        resolved_args={
            "device": "cpu",
            "attention_backend": "torch_native",
            "kv_cache_dtype": "auto",
            "tp_size": 1,
            **resolved,
        },
        served_model_name="smol",
        model={"path": "models/smol", "sha256": "ab" * 32},
        host={"cpu": "two cores", "gpus": [], "gpus_reason": "no NVIDIA driver"},
        fingerprint="cd" * 32,
        checks=[
            "before 03: the port's owner is the launched process",
            "after 03: the port's owner is the launched process",
        ],
    )


def levels() -> list[dict[str, Any]]:
    """Three levels of a benchmark."""
    rows = [(1, 17.31, 0.212, 0.0556), (2, 30.94, 0.301, 0.0612), (4, 44.07, 0.553, 0.0813)]
    return [
        {
            "concurrency": c,
            "output_tokens_per_s": interval(rate, "tok/s", 0.06, max(4, 2 * c)),
            "ttft_s": interval(ttft, "s", 0.2, max(4, 2 * c)),
            "itl_s": interval(itl, "s", 0.05, 400),
        }
        for c, rate, ttft, itl in rows
    ]


def verdicts(number: str) -> list[Verdict]:
    """Verdicts of one notebook, one of each kind over the run."""
    log = Evidence(
        path=f"raw/{number}/server.log", line=3, quote="KV Cache is allocated. dtype: torch.bfloat16, #tokens: 40960"
    )
    missing = Evidence(path=f"raw/{number}/gone.json")
    by_number = {
        "01": [
            Verdict(
                id="known-answer",
                claim="The model continues 'The capital of France is' with ' Paris'",
                status=Status.PASS,
                measured=Measured(value=" Paris"),
                predicted=Measured(value=" Paris"),
                limit="equal",
                rule="build.answer",
                reason="the answer's first token is the expected one",
                evidence=[log],
                launch_ids=["L-01"],
            )
        ],
        "02": [
            Verdict(
                id="intel_amx",
                claim="intel_amx runs when it is asked for",
                status=Status.FAIL,
                measured=Measured(value="torch_native"),
                predicted=Measured(value="intel_amx"),
                limit="equal",
                reason="served, but the resolved backend is torch_native: silently ignored",
                evidence=[log, missing],
            ),
            Verdict(
                id="triton",
                claim="triton runs on this host",
                status=Status.UNSUPPORTED,
                reason="the server needs a GPU driver for it",
                evidence=[log],
            ),
        ],
        "03": [
            Verdict(
                id="throughput",
                claim="C=4 gives at least 40 tok/s",
                status=Status.PASS,
                measured=levels()[2]["output_tokens_per_s"],
                predicted=Measured(value=62.0, unit="tok/s", reason="a ceiling"),
                limit=">= 40 tok/s",
                rule="bench.rate",
                reason="the whole interval is above the limit",
                evidence=[log],
                launch_ids=["L-03"],
            ),
            Verdict(
                id="ttft",
                claim="The first token comes within 500 ms at C=4",
                status=Status.INCONCLUSIVE,
                measured=levels()[2]["ttft_s"],
                limit="<= 0.5 s",
                rule="bench.ttft",
                reason="the interval crosses the limit",
                evidence=[log],
                launch_ids=["L-03"],
            ),
        ],
        "04": [
            Verdict(
                id="nextn",
                claim="NEXTN raises throughput",
                status=Status.INVALID,
                reason="no trace of the treatment: no verify step in the log",
                evidence=[log],
            )
        ],
        "05": [
            Verdict(
                id="kv dtype",
                claim="fp8_e4m3 KV moves log-probabilities by less than 0.02 nat",
                status=Status.FAIL,
                measured=Measured(value=0.0312, unit="nat", n=2048, low=0.0288, high=0.0336),
                limit="< 0.02 nat",
                rule="kv.shift",
                reason="the whole interval is beyond the limit",
                evidence=[log],
                launch_ids=["L-05"],
            ),
            Verdict(
                id="hostile",
                claim=HOSTILE,
                status=Status.ERROR,
                reason=HOSTILE,
                evidence=[Evidence(path="javascript:alert(1)", quote=HOSTILE)],
            ),
        ],
        "06": [],
    }
    return by_number[number]


def predictions(number: str) -> list[Prediction]:
    """One prediction that holds and one that doesn't."""
    if number != "05":
        return []
    return [
        Prediction(
            id="kv-bytes",
            what="KV bytes per token",
            predicted=Measured(value=23040, unit="bytes/token"),
            formula="2 * layers * kv_heads * head_dim * 2 = 2 * 30 * 3 * 64 * 2",
            source="config.json",
            measured=Measured(value=23040, unit="bytes/token", n=1, reason="one line of the log"),
        ),
        Prediction(
            id="pool",
            what="KV pool",
            predicted=Measured(value=1_073_741_824, unit="bytes"),
            formula="fraction * free - weights",
            source="docs",
            measured=Measured(value=943_718_400, unit="bytes", n=1, reason="one line of the log"),
        ),
    ]


def result(number: str, run_id: str = RUN_ID) -> NotebookResult:
    """One notebook's result."""
    title, question = TITLES[number]
    return NotebookResult(
        notebook=number,
        title=title,
        question=question,
        run_id=run_id,
        profile="embedded",
        started="2026-03-01T12:00:00+00:00",
        ended="2026-03-01T12:01:00+00:00",
        seconds=61.4,
        server_seconds=48.9,
        provenance=Provenance(
            commit="0123456789abcdef",
            dirty=False,
            workbook_version="0.1.0",
            python="3.11.7",
            packages_sha256="ef" * 32,
            params_sha256="12" * 32,
            params={"profile": "embedded", "seed": 7},
            host={"cpu": "two cores", "cpu_cores": 2},
        ),
        servers=[] if number == "06" else [identity(f"L-{number}")],
        predictions=predictions(number),
        trials=[
            Trial(
                id="native",
                what="torch_native",
                outcome="works",
                values={"ready": Measured(value=14.2, unit="s", reason="one run")},
                seconds=20.1,
            ),
            Trial(
                id="amx", what="intel_amx", outcome="silently_ignored", reason="resolved to torch_native", seconds=19.8
            ),
        ]
        if number == "02"
        else [],
        verdicts=verdicts(number),
        recommendation=f"What notebook {number} recommends, in one sentence.",
        skipped=["GPU telemetry: no NVIDIA driver on this host"] if number == "03" else [],
    )


def _shown(made: Any) -> Any:
    return new_output("execute_result", {"text/html": made._repr_html_(), "text/plain": repr(made)}, execution_count=1)


def _figure(figure: Any) -> Any:
    return new_output("display_data", {"image/svg+xml": figure_svg(figure), "text/plain": repr(figure)})


def notebook(number: str) -> Any:
    """An executed notebook, as papermill would leave it."""
    title, question = TITLES[number]
    made = new_notebook(metadata={"language_info": {"name": "python"}})
    frame = pd.DataFrame({"distribution": ["torch", HOSTILE], "version": ["2.9.1", "1"]})
    cells = [
        new_markdown_cell(
            f"# {title}: {question}\n\nThe decision that hangs on it. Source: [a page](https://example.invalid/a)."
        ),
        new_code_cell("seed = 7  # literal\nprofile = 'embedded'", metadata={"tags": ["parameters"]}),
        new_code_cell(
            "from lib import results\n\nrun = results.open_run(seed, profile)",
            execution_count=2,
            outputs=[
                new_output(
                    "stream", name="stderr", text="\r 10%|#         |\r 50%|#####     |\r100%|##########|\nready\n"
                ),
                new_output("stream", name="stdout", text=f"answer: \x1b[32m Paris\x1b[0m {HOSTILE}\n"),
            ],
        ),
        new_markdown_cell("## What we expect\n\n| quantity | formula |\n|---|--:|\n| pool | $f \\cdot M - W$ |\n"),
        new_code_cell(
            "prediction_table(predictions)", execution_count=3, outputs=[_shown(prediction_table(predictions(number)))]
        ),
        new_markdown_cell("## What is installed?"),
        new_code_cell(
            "distributions",
            execution_count=4,
            outputs=[
                new_output(
                    "execute_result", {"text/html": frame._repr_html_(), "text/plain": repr(frame)}, execution_count=4
                )
            ],
        ),
        new_code_cell(
            "slider",
            execution_count=5,
            outputs=[
                new_output(
                    "display_data",
                    {
                        "application/vnd.jupyter.widget-view+json": {
                            "model_id": "a",
                            "version_major": 2,
                            "version_minor": 0,
                        },
                        "text/plain": "IntSlider(value=3)",
                    },
                )
            ],
        ),
        new_code_cell(
            "display(HTML(answer))",
            execution_count=6,
            outputs=[
                new_output(
                    "display_data",
                    {
                        "text/html": f"<p onclick='x()' style='position:fixed'>{HOSTILE}</p><iframe src='https://x.invalid/'></iframe>"
                        "<a href='javascript:alert(1)'>click</a><link rel=stylesheet href='https://x.invalid/a.css'>",
                        "text/plain": "x",
                    },
                )
            ],
        ),
    ]
    figures = {
        "02": startup_phases(
            [
                {"phase": "import", "seconds": 8.1},
                {"phase": "load weights", "seconds": 3.2},
                {"phase": "warm-up", "seconds": 1.2},
            ],
            deadline_s=60,
        ),
        "03": throughput_latency(levels(), ceiling=62.0, ceiling_label="weights ceiling", limits={"ttft_s": 0.5}),
        "04": acceptance(
            [
                {"label": "random ids", "accept_length": interval(1.02, "", 0.01, 64), "most": 4},
                {"label": "repeating text", "accept_length": interval(3.7, "", 0.04, 64), "most": 4},
            ]
        ),
        "05": difference_by_position(
            {
                name: [
                    {
                        "first": a,
                        "last": b,
                        "mean": Measured(value=size * i, unit="nat", low=size * i - 0.003, high=size * i + 0.003),
                    }
                    for i, (a, b) in enumerate([(1, 256), (257, 512), (513, 1024)])
                ]
                for name, size in (("noise floor", 0.0001), ("fp8_e4m3", 0.0112))
            },
            limits=0.02,
        ),
    }
    if number in figures:
        cells += [
            new_markdown_cell("## What does it look like?"),
            new_code_cell("figure", execution_count=7, outputs=[_figure(figures[number])]),
        ]
    if number == "02":
        cells.append(new_code_cell("trials", execution_count=8, outputs=[_shown(trial_table(result("02").trials))]))
    cells += [
        new_markdown_cell("## What this does not show\n\nA GPU."),
        new_markdown_cell("## Verdict"),
        new_code_cell("verdict_table(verdicts)", execution_count=9, outputs=[_shown(verdict_table(verdicts(number)))]),
    ]
    made.cells = cells
    return made


def write_json(path: Path, content: Any) -> None:
    """JSON as Jupyter and the records write it (also text that is not valid Unicode)."""
    path.write_text(json.dumps(content), encoding="utf-8")


def make_run(folder: Path) -> Path:
    """A run of six notebooks: 01 to 05 done, 06 failed without a result."""
    folder.mkdir(parents=True, exist_ok=True)
    states = []
    for number in TITLES:
        write_json(folder / f"{number}.ipynb", notebook(number))
        log = folder / "raw" / number / "server.log"
        log.parent.mkdir(parents=True)
        log.write_text("one\ntwo\nKV Cache is allocated. dtype: torch.bfloat16, #tokens: 40960\n")
        if number == "06":
            error = f"cell 7: ServerDied: the server ended with code 1\n{HOSTILE}"
            states.append(NotebookState(notebook=number, state="failed", error=error, ipynb="06.ipynb", seconds=9.5))
            continue
        (folder / f"{number}.result.json").write_text(result(number).model_dump_json(indent=1))
        states.append(
            NotebookState(
                notebook=number,
                state="done",
                result=f"{number}.result.json",
                ipynb=f"{number}.ipynb",
                html=f"{number}.html",
                seconds=61.4,
            )
        )
    run = RunResult(
        selected=["01", "02", "03", "04", "05", "06"],
        run_id=RUN_ID,
        profile="embedded",
        started="2026-03-01T12:00:00+00:00",
        ended="2026-03-01T12:06:00+00:00",
        seconds=360.25,
        server_seconds=244.5,
        state="failed",
        notebooks=states,
    )
    (folder / "result.json").write_text(run.model_dump_json(indent=1))
    return folder
