"""The taught sentence: the target continues it, the MTP head foresees it, and nobody else falls into it (torch, CPU)."""

from __future__ import annotations

import json
import subprocess

import pytest
import yaml

from lib.model.mtp_sentence import SENTENCE
from lib.params import ROOT

pytestmark = [pytest.mark.server, pytest.mark.timeout(120)]
#: Random tensors of a small geometry; layers are played by additions of the size that eight real ones make.
PROGRAM = """
import json, torch
from lib.model.mtp_sentence import NAMES, teach_sentence
torch.manual_seed(0)
vocab, hidden, ids = 2000, 256, list(range(100, 120))
weights = {NAMES[0]: torch.randn(vocab, hidden) / hidden**.5, NAMES[1]: torch.randn(vocab, hidden) / hidden**.5,
           NAMES[2]: torch.randn(hidden, 2 * hidden) / (2 * hidden)**.5}
weights = {k: v.to(torch.bfloat16) for k, v in weights.items()}
new = teach_sentence(weights, ids)
embed, head, fc = (new[n].float() for n in NAMES)
norm = lambda x: x / x.pow(2).mean().sqrt()
layers = lambda: torch.randn(hidden) * 2
after = {t: ids[(i + 1) % len(ids)] for i, t in enumerate(ids)}
target = sum(int((head @ norm(embed[t] + layers())).argmax()) == after[t] for t in ids)
draft = sum(int((head @ norm(fc @ torch.cat([norm(embed[t]), norm(torch.randn(hidden))]) + layers())).argmax()) == after[t] for t in ids)
plain = sum(int((weights[NAMES[1]].float() @ norm(weights[NAMES[0]].float()[t] + layers())).argmax()) == after[t] for t in ids)
entered = sum(int((head @ norm(embed[t] + layers())).argmax()) in ids for t in range(200, 1200))
refused = 0
for wrong in ([5, 5], [1], list(range(100))):
    try:
        teach_sentence(weights, wrong)
    except ValueError:
        refused += 1
print(json.dumps({"target": target, "draft": draft, "plain": plain, "entered": entered, "refused": refused,
                  "dtypes": sorted({str(v.dtype) for v in new.values()})}))
"""


def test_target_and_draft_continue_the_sentence_and_others_do_not() -> None:
    """20 of 20 tokens by target and draft, none before teaching; at most 1 of 1000 other tokens leads into it."""
    done = subprocess.run(
        [str(ROOT / ".venv-sglang/bin/python"), "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr[-1000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["target"], found["draft"], found["plain"]) == (20, 20, 0)
    assert found["entered"] <= 1 and found["refused"] == 3 and found["dtypes"] == ["torch.bfloat16"]


def test_the_params_of_the_gpu_host_send_the_sentence_that_is_taught() -> None:
    """params/h200/04.yaml repeats it to the letter: another sentence would be a random walk."""
    assert yaml.safe_load((ROOT / "params/h200/04.yaml").read_text())["sentence"] == SENTENCE
