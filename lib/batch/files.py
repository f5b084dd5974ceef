"""Reads a matrix file with the profiles that it stands on."""

from __future__ import annotations

import re
from pathlib import Path

from lib.batch.matrix import Cell, LeftOut, MatrixFile, expand, profiles_named
from lib.errors import BadParams
from lib.params import MODELS, ROOT, profile_folder, read_yaml, validated
from lib.results import EXAMPLES

FOLDER = ROOT / "params" / "matrix"


def read_matrix(named: str, notebooks: list[str] | None = None) -> tuple[str, list[Cell], list[LeftOut]]:
    """A matrix's name, its cells in order, and what it leaves out.

    Args:
        named: a name under params/matrix/, or a file.
        notebooks: numbers in place of the file's own; a cell that has others too loses them.

    Raises:
        BadParams: no such file, or any fault in it or in a profile, all at once.
    """
    path = matrix_file(named)
    name = path.stem
    if not re.fullmatch(r"[A-Za-z0-9_=+-]{1,60}", name) or name == EXAMPLES:
        raise BadParams("a matrix file is named by letters, digits, - _ = + and .yaml", path.name, "rename it")
    matrix: MatrixFile = validated(MatrixFile, read_yaml(path), str(path))
    if notebooks is not None:
        matrix = matrix.model_copy(update={"notebooks": notebooks})
    profiles = {}
    for profile in profiles_named(matrix):
        folder = profile_folder(profile)
        files = {number: folder / f"{number}.yaml" for number in MODELS}
        read = {number: read_yaml(file) for number, file in files.items() if file.is_file()}
        profiles[profile] = {"profile": read_yaml(folder / "profile.yaml"), **read}
    cells, left_out = expand(matrix, name, profiles)
    return name, cells, left_out


def matrix_file(named: str) -> Path:
    """The file of a matrix: itself, or by its name below params/matrix/.

    Raises:
        BadParams: there is none; names the known ones.
    """
    for path in (Path(named), FOLDER / f"{named}.yaml"):
        if path.is_file():
            return path
    known = ", ".join(sorted(p.stem for p in FOLDER.glob("*.yaml"))) or "none yet"
    raise BadParams(
        f"a matrix file {named!r}", f"no such file; in params/matrix: {known}", "docs/batch.md has an example"
    )
