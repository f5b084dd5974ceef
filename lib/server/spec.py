"""From parameters to a resolved launch: which interpreter, which SGLang, which model, which argv."""

from __future__ import annotations

import functools
import os
import subprocess
from pathlib import Path

from lib.errors import BadInput
from lib.model.cache import model_dir
from lib.model.checkpoint import model_fingerprint
from lib.params import ROOT, ServerParams
from lib.server.flags import launch_argv
from lib.server.launch import ServerSpec


def server_spec(name: str, params: ServerParams, strict: bool = True) -> ServerSpec:
    """The launch that these parameters mean; one argv function for the sweep, the benchmark and the unit file alike.

    Args:
        name: what the launch is called.
        params: the server's parameters.
        strict: False passes flags and choices that this version doesn't know, so that SGLang refuses them in its own words.

    Raises:
        BadInput: no such model folder, not a model, or no SGLang behind `server.python`.
        BadParams: flags that this SGLang version doesn't know.
    """
    model = resolve_model(params.model or "")
    python = resolve_python(params.python)
    version = params.sglang_version or installed_sglang(str(python))
    launch = launch_argv(
        {
            "model_path": str(model),
            "served_model_name": params.served_model_name,
            "flags": params.flags,
            "environment": params.environment,
        },
        version,
        params.host,
        params.port or 1,
        strict=strict,
    )
    argv = list(launch.argv)
    argv[argv.index("--port") + 1] = "{port}"  # known only when the server is started
    return ServerSpec(
        name=name,
        argv=[str(python), "-m", "sglang.launch_server", *argv],
        environment=launch.environment,
        sglang_version=version,
        model_path=str(model),
        model=model_fingerprint(model),
        host=params.host,
        port=params.port,
        api_key_env=params.api_key_env,
        ready_timeout_s=params.ready_timeout_s,
        stop_timeout_s=params.stop_timeout_s,
        keep=params.keep,
        notes=[note.text for note in launch.notes],
    )


def resolve_model(model: str) -> Path:
    """The checkpoint's folder: a path, or the name of an embedded model in the cache.

    Raises:
        BadInput: neither exists; says how to get the embedded ones.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return path.resolve()
    if model and "/" not in model and not model.startswith("."):
        return model_dir(model)
    raise BadInput(
        f"server.model is a checkpoint folder or an embedded model's name: {model!r}",
        "no such folder",
        "correct the path, or run `make report` or `make test` once: they make the embedded models",
    )


def resolve_python(python: str) -> Path:
    """The interpreter that has SGLang; relative paths count from the project. Symbolic links are kept (virtual environments)."""
    path = Path(python).expanduser()
    path = path if path.is_absolute() else ROOT / path
    if not path.is_file() or not os.access(path, os.X_OK):
        raise BadInput(
            f"server.python is an interpreter with SGLang: {python!r}",
            "no such executable",
            "run `make report` once (it makes .venv-sglang), or name the Python of your SGLang environment",
        )
    return path


@functools.cache
def installed_sglang(python: str) -> str:
    """SGLang's version in an interpreter's environment, from its metadata (nothing of SGLang is imported)."""
    code = "import importlib.metadata as m; print(m.version('sglang'))"
    try:
        out = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BadInput(f"{python} runs", f"{type(error).__name__}: {error}", "correct server.python") from error
    if out.returncode:
        raise BadInput(
            f"SGLang installed in the environment of {python}",
            (out.stderr.strip().splitlines() or ["no answer"])[-1],
            "install it there, or correct server.python",
        )
    return out.stdout.strip()
