"""Which GPU each installed library has kernels for, before anything is launched: read from the shared objects themselves.

'No kernel image is available for execution on the device' is what a server says after minutes of loading; the same is
written in its wheels. The libraries are found by the interpreter that runs the server; nothing of them is loaded.
"""

from __future__ import annotations

import json
import mmap
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lib.deploy.fatbin import DeviceCode, NotElf, device_code, outlook, uneven
from lib.errors import BadInput, NotMeasured
from lib.hosts import local
from lib.records import Measured, Status, Verdict
from lib.results import NotebookRun, ServerHandle
from lib.server.spec import resolve_python

#: Distributions whose device code a server runs; others (jax, cupy) may lie in the same environment.
SERVING = re.compile(
    r"^(sglang|sgl[-_]|torch|flashinfer|flash[-_]attn|triton|vllm|apache[-_]tvm|xgrammar|tilelang|quack|humming|tokenspeed)", re.I
)
#: What a library is needed for, and what SGLang does without it. Source: SGLang 0.5.16's imports, read.
ROLES = {
    "common_ops": ("all of sglang-kernel: norms, activations, rope, MoE, sampling", "the server does not start"),
    "flash_ops": ("--attention-backend fa3", "choose triton or flashinfer"),
    "flashmla_ops": ("--attention-backend flashmla (MLA models)", "choose another attention backend"),
    "spatial_ops": ("green contexts (pdmux)", "needed for --enable-pdmux alone"),
    "infllm_ops": ("sparse attention of MiniCPM models", "needed for these models alone"),
    "libtorch_cuda": ("all of torch on CUDA", "nothing runs"),
}

_SCRIPT = r"""
import importlib.metadata as m, json, os
rows, seen = [], set()
for d in m.distributions():
    name = d.metadata["Name"]
    if not name or name.lower() in seen:
        continue
    seen.add(name.lower())
    for f in d.files or []:
        if ".so" in f.name and "__pycache__" not in str(f):
            rows.append([name, d.version, str(f), os.path.abspath(str(f.locate()))])
print(json.dumps(rows))
"""


def read_device_code(path: Path) -> list[DeviceCode]:
    """The device code of one file, by mapping it: a library of a gigabyte takes about a second.

    Raises:
        NotElf, OSError: no shared object, or not readable.
    """
    with path.open("rb") as file:
        if not os.fstat(file.fileno()).st_size:
            raise NotElf("empty file")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return device_code(data)


def by_cuobjdump(path: Path) -> set[str] | None:
    """The names of machine code (sm_90a ...) that CUDA's own cuobjdump lists; None where there is no cuobjdump.

    It drops the 'a' in its listing's file names, so numbers alone are compared.
    """
    program = shutil.which("cuobjdump") or "/usr/local/cuda/bin/cuobjdump"
    try:
        done = subprocess.run([program, "-lelf", str(path)], capture_output=True, text=True, timeout=120, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return set(re.findall(r"\.(sm_\d+)a?f?\.cubin", done.stdout))


def take_kernels(folder: Path, python: str) -> None:
    """Writes kernels.json: every shared object of the serving packages with its embedded architectures.

    Raises:
        BadInput: the interpreter does not run.
    """
    done = subprocess.run([python, "-c", _SCRIPT], capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        raise BadInput(f"{python} lists its shared objects", (done.stderr.strip().splitlines() or ["no output"])[-1])
    libraries = []
    checked: set[str] | None = None
    for name, version, file, path in json.loads(done.stdout):
        if not SERVING.match(name):
            continue
        row: dict[str, Any] = {"package": name, "version": version, "file": file}
        try:
            code = read_device_code(Path(path))
        except (NotElf, OSError, ValueError) as error:
            libraries.append({**row, "reason": f"{type(error).__name__}: {error}"[:200]})
            continue
        if not code:
            continue
        if Path(path).stat().st_size < 200 << 20:
            checked = by_cuobjdump(Path(path))
        mine = {f"sm_{c.sm}" for c in code if c.kind == "sass"}
        agrees = None if not checked else checked == mine
        libraries.append({**row, "code": [c.model_dump() for c in code], "cuobjdump_agrees": agrees})
        checked = None
    local.write_atomic(folder / "kernels.json", json.dumps({"libraries": libraries}, indent=1))


def kernels_of(run: NotebookRun, server: ServerHandle) -> dict[str, Any]:
    """The raw record `kernels` of a notebook's run; for an attached server, why it isn't read."""
    if server.attached:
        run.skip("the kernels of the server's environment", "the server is attached, not launched from an environment named here")
        return {"libraries": [], "reason": "attached server"}
    python = None if run.offline else str(resolve_python(server.params.python))
    try:
        return dict(run.measure("kernels", None, take_kernels, python=python).json("kernels.json"))
    except NotMeasured as error:  # a run of before this record existed
        run.skip("the kernels of the server's environment", str(error))
        return {"libraries": [], "reason": str(error)}


def sm_of(compute_capability: str | None) -> int | None:
    """90 for '9.0', 121 for '12.1'; None for what is no compute capability.

    Accepts 'SM90', 'sm_120a' and '12.0' alike.
    """
    text = str(compute_capability or "").strip().lower()
    if found := re.fullmatch(r"(\d+)\.(\d)", text):
        return int(found[1]) * 10 + int(found[2])
    if found := re.fullmatch(r"sm_?(\d{2,3})[af]?", text):
        return int(found[1])
    return None


def target(inventory: Mapping[str, Any], stated: str | None) -> tuple[int | None, str]:
    """The architecture that is judged, and where it comes from: stated in the parameters, else the host's GPUs.

    Raises:
        BadInput: what was stated is no compute capability, or the host's GPUs differ.
    """
    if stated is not None:
        sm = sm_of(stated)
        if sm is None:
            raise BadInput("compute_capability as '12.0' or 'SM120'", repr(stated), "correct it in 01.yaml")
        return sm, "stated in the parameters"
    found = {sm_of(g.get("compute_cap")) for g in (inventory.get("host") or {}).get("gpus", [])}
    if len(found) > 1:
        raise BadInput("GPUs of one architecture", f"{sorted(map(str, found))}", "state compute_capability in 01.yaml")
    if not found or found == {None}:
        return None, "no GPU on this host, and none stated"
    return found.pop(), "the host's GPUs"


def chosen_variant(file: str, sm: int) -> bool:
    """Whether this variant is the one that its package loads on that GPU (sgl_kernel: sm90 on 9.0, sm100 elsewhere)."""
    found = re.search(r"(?:^|/)sgl_kernel/(sm\d+)/", file)
    return not found or found[1] == ("sm90" if sm == 90 else "sm100")


def stem(file: str) -> str:
    """common_ops of sgl_kernel/sm90/common_ops.abi3.so."""
    return Path(file).name.split(".")[0]


def kernel_rows(found: Mapping[str, Any], sm: int | None) -> list[dict[str, Any]]:
    """One row a library: what it carries, what the judged GPU makes of it, and what it is needed for."""
    rows = []
    for library in found["libraries"]:
        code = [DeviceCode.model_validate(c) for c in library.get("code", [])]
        says = library.get("reason") or ("not judged" if sm is None else outlook(code, sm))
        if sm is not None and says == "native" and uneven(code, sm):
            says = "native, but not all of its kernels"
        if sm is not None and not chosen_variant(library["file"], sm):
            says += " (not the variant loaded there)"
        role, without = ROLES.get(stem(library["file"]), ("", ""))
        rows.append({
            "library": library["file"], "package": f"{library['package']} {library['version']}",
            "architectures": " ".join(c.name for c in code), f"on SM{sm}" if sm else "judged": says,
            "needed for": role, "without it": without,
        })  # fmt: skip
    return rows


def traps(found: Mapping[str, Any], sm: int) -> list[dict[str, Any]]:
    """What would fail at a kernel's first launch on that GPU, each with why and what to do."""
    made = []
    for library in found["libraries"]:
        code = [DeviceCode.model_validate(c) for c in library.get("code", [])]
        if not code or not chosen_variant(library["file"], sm):
            continue
        if outlook(code, sm) == "no kernel image":
            specific = sorted({c.name for c in code if c.specific})
            lowest = min(c.sm for c in code)
            why = "no code for it, and no PTX that a driver could compile"
            if lowest // 10 > sm // 10:
                why = f"SM{lowest}-only: its code begins above this GPU"
            elif any(c.specific and c.sm // 10 == sm // 10 for c in code):
                why = f"its code of that generation is architecture-specific ({', '.join(specific)}) and runs on exactly that one"
            _, without = ROLES.get(stem(library["file"]), ("", "what uses it fails at its first launch"))
            made.append({"library": library["file"], "trap": "no kernel image", "why": why, "do": without or "do without it"})
        elif uneven(code, sm):
            made.append({
                "library": library["file"], "trap": "not all kernels", "why": "fewer kernels than for another architecture",
                "do": "what uses the missing ones fails at its first launch",
            })  # fmt: skip
    return made


def verdict(run: NotebookRun, found: Mapping[str, Any], sm: int | None, where: str) -> Verdict:
    """Whether what every server needs (common_ops, torch) has code for the judged GPU."""
    common: dict[str, Any] = {
        "id": "kernels",
        "claim": "The libraries that every launch loads have kernels for this GPU",
        "rule": "lib.deploy.fatbin",
        "limit": "no library without a kernel image",
    }
    needed = [x for x in found["libraries"] if stem(x["file"]) in ("common_ops", "libtorch_cuda") and "code" in x]
    if found.get("reason"):
        return Verdict(status=Status.INCONCLUSIVE, reason=found["reason"], **common)
    if sm is None:
        return Verdict(status=Status.INCONCLUSIVE, reason=where, **common)
    needed = [x for x in needed if chosen_variant(x["file"], sm)]
    evidence = [run.evidence(run.raw / "kernels" / "kernels.json")]
    if not needed:
        return Verdict(status=Status.INCONCLUSIVE, reason="no library with device code in this environment (a CPU build)", **common)
    bad = [t for t in traps({"libraries": needed}, sm) if t["trap"] == "no kernel image"]
    elsewhere = [stem(t["library"]) for t in traps(found, sm)]
    reason = "; ".join(f"{t['library']}: {t['why']}" for t in bad) or f"SM{sm} ({where}): {', '.join(stem(x['file']) for x in needed)}"
    if not bad and elsewhere:
        reason += f"; without code for it, but not loaded by default: {', '.join(sorted(set(elsewhere)))}"
    return Verdict(
        status=Status.FAIL if bad else Status.PASS, reason=reason, evidence=evidence,
        measured=Measured(value=len(bad), unit="libraries", n=len(needed), reason="counted"), **common,
    )  # fmt: skip


def prospects(found: Mapping[str, Any], architectures: Sequence[int] = (90, 100, 103, 120, 121)) -> list[dict[str, Any]]:
    """What these wheels would do on other GPUs: one row an architecture, with the libraries that have no code for it."""
    rows = []
    for sm in architectures:
        bad = [t for t in traps(found, sm) if t["trap"] == "no kernel image"]
        rows.append({
            "GPU": f"SM{sm}", "starts": "no" if any(stem(t["library"]) in ("common_ops", "libtorch_cuda") for t in bad) else "yes",
            "without kernels": ", ".join(t["library"] for t in bad) or "none",
        })  # fmt: skip
    return rows
