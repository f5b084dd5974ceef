"""Where the models of the embedded profile lie: one folder for a user, shared by all clones.

Standard library only: the set-up (system Python), the model maker (the server's Python) and the notebooks import it.
`make_models.py` puts a model there by one rename, with `workbook-model.json` (recipe, size of each file) inside:
a folder without that file is not a model.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from lib.errors import BadInput

#: Written into each model's folder, before the folder gets its name.
STAMP = "workbook-model.json"


def cache_dir() -> Path:
    """The folder for what is downloaded or made once.

    `WORKBOOK_CACHE` names it; else it is `sglang-workbook` in `XDG_CACHE_HOME`, or in ~/.cache.
    """
    for variable, below in (("WORKBOOK_CACHE", ""), ("XDG_CACHE_HOME", "sglang-workbook")):
        value = os.environ.get(variable)
        if value:
            return Path(value).expanduser().absolute() / below
    return Path.home() / ".cache" / "sglang-workbook"


def model_path(name: str) -> Path:
    """The folder in which model `name` lies or will lie, whether it is there or not."""
    return cache_dir() / "models" / name


def faults(folder: Path) -> list[str]:
    """What is wrong with a model's folder: no stamp, or files that miss or have another size than when it was made."""
    try:
        stamp = json.loads((folder / STAMP).read_text(encoding="utf-8"))
        sizes = dict(stamp["files"])
    except FileNotFoundError:
        return [f"no {STAMP}" if folder.is_dir() else "no such folder"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return [f"{STAMP} is not readable ({error})"]
    found = []
    for file, size in sizes.items():
        path = folder / file
        if not path.is_file():
            found.append(f"{file} is missing")
        elif path.stat().st_size != size:
            found.append(f"{file} has {path.stat().st_size:,} bytes instead of {size:,}")
    return found


def model_dir(name: str) -> Path:
    """The folder of model `name` (`smollm2-135m-instruct`, `tiny-qwen3`, ...), complete.

    Raises:
        BadInput: it has not been made on this machine, or files of it are missing or cut off.
    """
    folder = model_path(name)
    wrong = faults(folder)
    if wrong:
        raise BadInput(
            f"model {name!r} in {folder}",
            found=", ".join(wrong),
            do="run 'make models', which makes what is missing",
        )
    return folder
