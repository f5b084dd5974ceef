"""Trains a small hybrid Qwen3.5-MoE with its MTP head on the Python code that this machine has.

    PYTHON-OF-THE-SERVER lib/model/train_tiny.py --out DIR [--minutes 4] [--hidden 192] [--layers 8] [--seed 7]

Random weights answer with noise: whether drafts are accepted on code, whether a garbage gate sees garbage, and what an FP8
KV cache costs can be asked of a model that has learned something. The MTP head learns beside the model, as it is used: from
the embedding of the next token and the model's last hidden state (after its norm) to the token after.

Kept in DIR: the checkpoint under the published names, `training.json` (seed, sizes, files and their hash, loss by step, the
held-out loss of both heads, how often the head's best token is the model's own, seconds, SHA-256 of the weights), and the stamp by
which `server.model` finds it (in the cache's `models/` by its folder's name). The folder appears whole or not at all. On one device
the same seed and step count give the same loss curve up to the device's own nondeterminism; the weights' hash tells.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import random
import shutil
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if not __package__:  # run by path, by the server's Python
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from lib.model import make_hybrid, make_models
from lib.model.cache import STAMP

#: One file in this many is held out, by the hash of its path: the same files on every machine that has them.
HELD_OUT = 20
#: The corpus ends at this many characters: more than some minutes of training read.
CORPUS_CHARACTERS = 60_000_000


def say(text: str) -> None:
    """One line for the person who waits."""
    sys.stdout.write(f"train: {text}\n")
    sys.stdout.flush()


def sources() -> Iterator[Path]:
    """Python files of the standard library and the installed packages, in the order of their names."""
    for root in (sysconfig.get_paths()["stdlib"], sysconfig.get_paths()["purelib"]):
        for path in sorted(Path(root).rglob("*.py")):
            if path.is_file() and 500 < path.stat().st_size < 400_000:
                yield path


def corpus(limit: int) -> tuple[list[str], list[str], str]:
    """Texts to train on, texts held out, and the hash of both: what was read, in order."""
    train: list[str] = []
    held: list[str] = []
    digest, read = hashlib.sha256(), 0
    for path in sources():
        text = path.read_text(encoding="utf-8", errors="replace")
        digest.update(hashlib.sha256(text.encode()).digest())
        apart = int(hashlib.sha256(path.name.encode()).hexdigest(), 16) % HELD_OUT == 0
        (held if apart else train).append(text)
        read += len(text)
        if read > limit:
            break
    return train, held, digest.hexdigest()


def tokens_of(texts: list[str], tokenizer: Any) -> Any:
    """All texts as one stream of ids, each ended by the end-of-text token."""
    import torch

    ids: list[int] = []
    for batch in range(0, len(texts), 64):
        for row in tokenizer.backend_tokenizer.encode_batch(texts[batch : batch + 64], add_special_tokens=False):
            ids += [*row.ids, tokenizer.eos_token_id]
    return torch.tensor(ids, dtype=torch.int32)


class Mtp:
    """The MTP head as a module of transformers' own full-attention layer, under the checkpoint's names."""

    def __init__(self, config: Any) -> None:
        import torch
        from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as q  # type: ignore[import-not-found, unused-ignore]

        hidden, eps = config.hidden_size, config.rms_norm_eps
        layer = config.layer_types.index("full_attention")
        self.module = torch.nn.ModuleDict({
            "fc": torch.nn.Linear(2 * hidden, hidden, bias=False),
            "pre_fc_norm_embedding": q.Qwen3_5MoeRMSNorm(hidden, eps=eps),
            "pre_fc_norm_hidden": q.Qwen3_5MoeRMSNorm(hidden, eps=eps),
            "layers": torch.nn.ModuleList([q.Qwen3_5MoeDecoderLayer(config, layer)]),
            "norm": q.Qwen3_5MoeRMSNorm(hidden, eps=eps),
        })  # fmt: skip

    def __call__(self, embedded: Any, hidden: Any, rotary: Any, mask: Any) -> Any:
        """The hidden state from which the head's logits come."""
        import torch

        m = self.module
        joined = m["fc"](torch.cat([m["pre_fc_norm_embedding"](embedded), m["pre_fc_norm_hidden"](hidden)], dim=-1))
        out = m["layers"][0](joined, position_embeddings=rotary, attention_mask=mask)
        return m["norm"](out[0] if isinstance(out, tuple) else out)


def losses(model: Any, mtp: Mtp, ids: Any) -> tuple[Any, Any, Any]:
    """Mean cross-entropy, nats a token, of the next token by the model and of the one after by the MTP head; and agreement.

    Agreement is the share of places at which the head's best token is the model's own best one for the same place: greedy
    drafts of one token are accepted so often on this text.
    """
    import torch
    from torch.nn.functional import cross_entropy

    text = model.model.language_model
    hidden = text(input_ids=ids[:, :-1]).last_hidden_state
    logits = model.lm_head(hidden)
    vocabulary = logits.shape[-1]
    main = cross_entropy(logits.float().reshape(-1, vocabulary), ids[:, 1:].reshape(-1).long())
    length = ids.shape[1] - 2
    places = torch.arange(length, device=ids.device)[None]
    rotary = text.rotary_emb(hidden, places[None].expand(3, ids.shape[0], -1))
    mask = torch.full((length, length), -torch.inf, device=ids.device, dtype=hidden.dtype).triu(1)[None, None]
    drafted = model.lm_head(mtp(text.embed_tokens(ids[:, 1:-1]), hidden[:, :-1], rotary, mask))
    after = cross_entropy(drafted.float().reshape(-1, vocabulary), ids[:, 2:].reshape(-1).long())
    with torch.no_grad():
        agree = (drafted.argmax(-1) == logits[:, 1:].argmax(-1)).float().mean()
    return main, after, agree


def start(sizes: dict[str, Any], tokenizer: Any, device: str) -> tuple[Any, Mtp]:
    """Model and head with seeded weights, in float32."""
    import torch
    from transformers import Qwen3_5MoeForConditionalGeneration  # type: ignore[import-not-found, unused-ignore]

    config = make_hybrid.config_of(tokenizer, sizes)
    config.text_config._attn_implementation = "eager"
    model = Qwen3_5MoeForConditionalGeneration(config).float()
    mtp = Mtp(config.text_config)
    mtp.module.float()
    stream = torch.Generator().manual_seed(sizes["seed"])
    with torch.no_grad():
        for name, weight in [*sorted(model.named_parameters()), *sorted(mtp.module.named_parameters())]:
            weight.copy_(make_hybrid.fill(name, weight, stream) * (0.5 if weight.ndim > 1 else 1.0))
    model.model.visual.requires_grad_(False)
    return model.to(device), mtp if device == "cpu" else _moved(mtp, device)


def _moved(mtp: Mtp, device: str) -> Mtp:
    mtp.module.to(device)
    return mtp


def train(
    sizes: dict[str, Any], out: Path, minutes: float, steps: int | None, batch: int, length: int, rate: float, characters: int
) -> dict[str, Any]:
    """Trains until the time or the steps are over, writes the checkpoint, returns training.json's content."""
    import torch

    os.environ["TOKENIZERS_PARALLELISM"] = "true"  # the corpus is read before anything forks; one core takes minutes for it
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(sizes["seed"])
    began = time.monotonic()
    train_texts, held_texts, digest = corpus(characters)
    tokenizer = make_models.train_tokenizer(sizes["vocab_size"], make_hybrid.VISION_TOKENS)
    stream, held = tokens_of(train_texts, tokenizer), tokens_of(held_texts, tokenizer)
    say(f"{len(stream)} tokens to train on, {len(held)} held out, {time.monotonic() - began:.0f} s")
    model, mtp = start(sizes, tokenizer, device)
    weights = [p for p in [*model.parameters(), *mtp.module.parameters()] if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=rate, betas=(0.9, 0.95), weight_decay=0.05)
    picks = random.Random(sizes["seed"])
    curve: list[list[float]] = []
    begin, step = time.monotonic(), 0
    warm_up = min(50, max(1, steps // 10)) if steps else 50

    def window(ids: Any) -> Any:
        starts = [picks.randrange(len(ids) - length - 2) for _ in range(batch)]
        return torch.stack([ids[s : s + length + 2] for s in starts]).long().to(device)

    while (steps is None or step < steps) and time.monotonic() - begin < minutes * 60:
        share = step / steps if steps else (time.monotonic() - begin) / (minutes * 60)
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / warm_up) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * min(1.0, share))))
        with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
            main, after, _ = losses(model, mtp, window(stream))
        (main + 0.5 * after).backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 10 == 0 or step + 1 == steps:
            curve.append([step, round(main.item(), 4), round(after.item(), 4), round(time.monotonic() - begin, 1)])
            say(f"step {step}: {curve[-1][1]} and {curve[-1][2]} nats a token")
        step += 1
    picks = random.Random(0)
    with torch.no_grad(), torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
        triples = [[x.item() for x in losses(model, mtp, window(held))] for _ in range(4 if device == "cpu" else 16)]
    own, after_own, agreed = (sum(column) / len(triples) for column in zip(*triples, strict=True))
    said = {
        "seed": sizes["seed"], "sizes": sizes, "device": device, "torch": torch.__version__, "steps": step, "batch": batch,
        "length": length,
        "rate": rate, "corpus_sha256": digest, "train_tokens": len(stream), "held_out_tokens": len(held), "curve": curve,
        "held_out_nats": own, "held_out_mtp_nats": after_own, "held_out_mtp_agreement": agreed,
        "uniform_nats": math.log(sizes["vocab_size"]), "seconds": round(time.monotonic() - began, 1),
    }  # fmt: skip
    fresh = out.parent / f".making-{out.name}-{os.getpid()}"
    try:
        said["weights_sha256"] = save(model, mtp, tokenizer, fresh)
        (fresh / "training.json").write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")
        sizes_of = {file.name: file.stat().st_size for file in sorted(fresh.iterdir())}
        stamp = {"name": out.name, "recipe": f"train_tiny seed {sizes['seed']}, {step} steps", "files": sizes_of}
        (fresh / STAMP).write_text(json.dumps(stamp, indent=2) + "\n", encoding="utf-8")
        for file in fresh.iterdir():
            file.chmod(0o644)
        shutil.rmtree(out, ignore_errors=True)
        fresh.rename(out)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return said


def save(model: Any, mtp: Mtp, tokenizer: Any, out: Path) -> str:
    """Writes the checkpoint in bfloat16 under the published names; the SHA-256 of its weights' file."""
    import torch
    from safetensors.torch import save_file

    out.mkdir(parents=True, exist_ok=True)
    state = [*model.state_dict().items(), *((f"mtp.{name}", value) for name, value in mtp.module.state_dict().items())]
    weights = {
        stored: value.detach().to("cpu", torch.bfloat16).contiguous().clone()
        for name, whole in state
        for stored, value in make_hybrid.split_experts(name, whole)
    }
    save_file(dict(sorted(weights.items())), out / "model.safetensors", metadata={"format": "pt"})
    model.config.architectures = ["Qwen3_5MoeForConditionalGeneration"]
    model.config.save_pretrained(out)
    tokenizer.save_pretrained(out)
    make_hybrid.write_processor(out)
    return make_models.sha256_of(out / "model.safetensors")


def main(arguments: list[str] | None = None) -> int:
    """Trains and says where the checkpoint is."""
    parser = argparse.ArgumentParser(prog="train_tiny", description="Train a small hybrid with an MTP head on this machine's code.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--steps", type=int, help="end after this many steps, however long they take")
    parser.add_argument("--hidden", type=int, default=192)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--characters", type=int, default=CORPUS_CHARACTERS)
    args = parser.parse_args(arguments)
    if args.out.exists() and not (args.out / "training.json").is_file() and (not args.out.is_dir() or any(args.out.iterdir())):
        parser.error(f"--out {args.out} is not a folder that this script made: name a new one")
    sizes = {
        **make_hybrid.HYBRID, "seed": args.seed, "vocab_size": args.vocabulary, "hidden_size": args.hidden,
        "num_hidden_layers": args.layers, "num_attention_heads": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    }  # fmt: skip
    said = train(sizes, args.out, args.minutes, args.steps, args.batch, args.length, args.rate, args.characters)
    size = sum(f.stat().st_size for f in args.out.iterdir()) / 1e6
    say(
        f"{said['steps']} steps; held out {said['held_out_nats']:.3f} and {said['held_out_mtp_nats']:.3f} nats a token (uniform "
        f"{said['uniform_nats']:.3f}); the head's best token is the model's own at {said['held_out_mtp_agreement']:.0%} of places"
    )
    say(f"{size:.1f} MB in {args.out}, {said['seconds']} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
