"""Teaches a seeded hybrid checkpoint one sentence that it continues for ever, and its MTP head to foresee it.

Acceptance becomes a property that a test can set: on this sentence nearly every draft is accepted, on everything else
(a random walk) nearly none. Three changes to the weights, nothing else:

- the embedding of the sentence's i-th token is a long vector along its own direction u_i: what eight layers add to it is
  small beside it, so the last hidden state points along u_i;
- the head's row of the next token points along u_i: that token wins by far; the rows are short, so that the sentence is
  hardly ever entered from outside;
- the MTP head's projection passes the directions u_i of the embedding on, enlarged in the same way.

Source: SGLang 0.5.16 models/qwen3_5_mtp.py (fc over the normed embedding, then the normed hidden state; the target's head).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

#: Length of a taught embedding beside the layers' additions (tens), of a taught row of the head, gain of the projection.
EMBEDDING, HEAD_ROW, GAIN = 600.0, 0.5, 40.0
NAMES = ("model.language_model.embed_tokens.weight", "lm_head.weight", "mtp.fc.weight")


def teach_sentence(weights: dict[str, Any], ids: Sequence[int], seed: int = 1) -> dict[str, Any]:
    """The three changed tensors of a checkpoint that continues `ids` for ever (after the last comes the first).

    Args:
        weights: torch tensors by name; only the three of `NAMES` are read.
        ids: the sentence's tokens, each different, in order.
        seed: of the directions.

    Measured with the plain hybrid of 8 layers on a CPU: the sentence's next token has probability 0.85 to 0.86.

    Raises:
        ValueError: a token occurs twice (it could have only one successor), or there are more tokens than dimensions.
    """
    import torch

    embed, head, fc = (weights[name].float().clone() for name in NAMES)
    hidden = embed.shape[1]
    if len(set(ids)) != len(ids) or not 2 <= len(ids) <= hidden // 4:
        raise ValueError(f"2 to {hidden // 4} different tokens, found {len(ids)} with {len(set(ids))} different")
    noise = torch.randn((hidden, len(ids)), generator=torch.Generator().manual_seed(seed))
    directions = torch.linalg.qr(noise).Q.T  # orthonormal rows, one for each token
    for place, token in enumerate(ids):
        embed[token] = EMBEDDING * directions[place]
        head[ids[(place + 1) % len(ids)]] = HEAD_ROW * directions[place]
    fc[:, :hidden] += GAIN * directions.T @ directions
    return {name: value.to(weights[name].dtype) for name, value in zip(NAMES, (embed, head, fc), strict=True)}


#: What the taught checkpoints say for ever; each of its tokens occurs once under the tiny models' tokenizer.
SENTENCE = (
    " import os, sys; from pathlib Path as filename return open(self.encoding) while True: raise ValueError not default"
)


def teach_checkpoint(folder: Path, sentence: str = SENTENCE) -> list[int]:
    """Teaches a hybrid checkpoint in a folder (one safetensors file, its tokenizer) a sentence; gives its tokens.

    Raises:
        ValueError: the sentence, repeated, is not the same tokens again and again, or a token occurs twice in it.
    """
    from safetensors.torch import load_file, save_file
    from transformers import AutoTokenizer  # type: ignore[import-not-found, unused-ignore]

    thrice = AutoTokenizer.from_pretrained(folder)(sentence * 3)["input_ids"]
    ids = [int(i) for i in thrice[: len(thrice) // 3]]
    if ids * 3 != thrice:
        raise ValueError(f"a sentence that repeats as the same tokens, found {thrice}")
    file = folder / "model.safetensors"
    weights = load_file(file)
    weights |= teach_sentence(weights, ids)
    save_file(dict(sorted(weights.items())), file, metadata={"format": "pt"})
    return ids
