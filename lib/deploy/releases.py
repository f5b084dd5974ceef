"""Which release of SGLang goes with which torch, kernels and FlashInfer; and where an environment contradicts its pins.

The table (`releases.json`) is what the wheels' own METADATA says, read through pip's dry-run report, with each wheel's
SHA-256. Text and numbers in, rows out.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import InvalidVersion, Version

#: The packages whose versions decide whether kernels load, in the order of the table's columns.
COLUMNS = ("torch", "sglang-kernel", "sgl-deep-gemm", "flashinfer-python", "transformers", "xgrammar", "nvidia-cutlass-dsl")


@functools.cache
def table() -> dict[str, Any]:
    """releases.json: for each SGLang and torch release its wheel, SHA-256 and Requires-Dist."""
    return dict(json.loads(resources.files("lib.deploy").joinpath("releases.json").read_text(encoding="utf-8")))


def normalised(name: str) -> str:
    """A distribution's name as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(release: str) -> dict[str, Requirement]:
    """What a release of SGLang requires, by normalised name; empty for one that the table lacks."""
    row = table()["sglang"].get(release)
    found = [Requirement(text) for text in row["requires"]] if row else []
    return {normalised(r.name): r for r in found}


def cuda_of_torch(version: str) -> str | None:
    """The CUDA version that a torch wheel of the package index is built for ('13.0'), from its own pins; None if unknown."""
    row = table()["torch"].get(version)
    for text in row["requires"] if row else []:
        found = re.match(r"(?:cuda-toolkit(?:\[.*\])?|nvidia-cuda-runtime(?:-cu\d+)?)==(\d+\.\d+)", text)
        if found:
            return found[1]
    return None


def rows(current: str | None = None) -> list[dict[str, Any]]:
    """One row a release: its pins, the CUDA of its torch; the installed one is marked."""
    made = []
    for release in sorted(table()["sglang"], key=Version):
        wanted = pins(release)
        row: dict[str, Any] = {"sglang": release + (" (installed)" if release == current else "")}
        for name in COLUMNS:
            found = wanted.get(name)
            row[name] = str(found.specifier).removeprefix("==") if found and found.specifier else "any" if found else "-"
        torch = str(wanted["torch"].specifier).removeprefix("==") if "torch" in wanted else ""
        row["CUDA of that torch"] = cuda_of_torch(torch) or "unknown"
        made.append(row)
    return made


def conflicts(distributions: Sequence[Mapping[str, Any]], torch_cuda: str | None) -> list[dict[str, Any]]:
    """Pins that the environment breaks: what, wanted, found, by whom; and a torch built for another CUDA than its release's.

    Only what the installed SGLang's own table row says is compared; a local or CPU build of torch ('2.13.0+cpu') counts as its
    public version. A missing package is a conflict too: the pin names it.
    """
    installed = {normalised(d["name"]): d["version"] for d in distributions}
    release = installed.get("sglang")
    if release is None:
        return []
    found = []
    for name, wanted in sorted(pins(release).items()):
        there = installed.get(name)
        if there is None:
            found.append({"package": name, "wanted": str(wanted.specifier) or "any", "found": "not installed", "by": f"sglang {release}"})
            continue
        try:
            fits = wanted.specifier.contains(Version(Version(there).public), prereleases=True)
        except InvalidVersion:
            fits = False
        if not fits:
            found.append({"package": name, "wanted": str(wanted.specifier), "found": there, "by": f"sglang {release}"})
    torch = installed.get("torch", "").split("+")[0]
    built = cuda_of_torch(torch)
    if built and torch_cuda and built.split(".")[0] != torch_cuda.split(".")[0]:
        found.append({"package": "torch's CUDA", "wanted": built, "found": torch_cuda, "by": f"torch {torch} of the package index"})
    return found


def channel(distributions: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Release, pre-release or local build of each serving package, from its version and where it came from."""
    made = []
    for d in distributions:
        name = normalised(d["name"])
        if name not in (*COLUMNS, "sglang", "sgl-kernel", "triton"):
            continue
        try:
            version = Version(d["version"])
        except (InvalidVersion, InvalidRequirement):
            made.append({"package": name, "version": d["version"], "channel": "not a version"})
            continue
        kind = "nightly or pre-release" if version.is_prerelease else "release"
        local = f", local label {version.local}" if version.local else ""
        made.append({"package": name, "version": str(version), "channel": kind + local})
    return made
