"""Architectures read from shared objects: crafted ELF files around headers that nvcc 13 really wrote."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from lib.deploy import fatbin, kernels

#: Entry headers as they are in sglang-kernel 0.4.5's sgl_kernel/spatial_ops.abi3.so (CUDA 13.0), up to the flags' end.
#: kind, version, header size, payload (cut to 8 here), ..., architecture at byte 28, flags at byte 40.
REAL = {  # name: (header size, sm, flags)
    "sm_80": (64, 80, 0x8011),
    "sm_89": (64, 89, 0x8011),
    "sm_90": (64, 90, 0x8011),
    "sm_90a": (64, 90, 0x108011),
    "sm_100a": (112, 100, 0x1108011),
    "sm_103a": (112, 103, 0x1108011),
    "sm_120a": (112, 120, 0x1108011),
}


def entry(header: int, sm: int, flags: int, kind: int = 2) -> bytes:
    """One entry with eight bytes of payload."""
    head = struct.pack("<HHIQIIIIII", kind, 0x101, header, 8, 0, 0, 0x10008, sm, 0, 0) + struct.pack("<QQQ", flags, 0, 0)
    return head.ljust(header, b"\0") + b"payload!"


def container(*entries: bytes) -> bytes:
    """A fatbin container."""
    body = b"".join(entries)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def elf(**sections: bytes) -> bytes:
    """A 64-bit ELF file with these sections (`__` in a name stands for its dot)."""
    names = b"\0"
    rows, body, at = [], b"", 64
    for name, data in {"": b"", **{k.replace("dot_", "."): v for k, v in sections.items()}}.items():
        rows.append((len(names) if name else 0, 1 if name else 0, at, len(data)))
        names += name.encode() + b"\0" if name else b""
        body += data
        at += len(data)
    rows.append((len(names), 3, at, len(names) + 10))
    names += b".shstrtab\0"
    body += names
    at += len(names)
    table = b"".join(struct.pack("<IIQQQQIIQQ", name, kind, 0, 0, offset, size, 0, 0, 1, 0) for name, kind, offset, size in rows)
    head = b"\x7fELF\x02\x01\x01".ljust(16, b"\0") + struct.pack(
        "<HHIQQQIHHHHHH", 3, 62, 1, 0, 0, at, 0, 64, 0, 0, 64, len(rows), len(rows) - 1
    )  # fmt: skip
    return head + body + table


def spatial_ops() -> bytes:
    """The seven architectures of the published library, in two containers with padding between."""
    rows = [entry(*REAL[name]) for name in REAL]
    return elf(dot_text=b"\x90" * 32, dot_nv_fatbin=container(*rows[:4]) + b"\0" * 24 + container(*rows[4:]))


def test_every_architecture_of_a_published_library_is_read() -> None:
    """The list is the one that nvcc was told (and cuobjdump prints, without the 'a'): seven architectures, one entry each."""
    code = fatbin.device_code(spatial_ops())
    assert sorted(c.name for c in code) == sorted(REAL)
    assert {c.entries for c in code} == {1}


@pytest.mark.parametrize(
    ("sm", "expected"),
    [
        (80, "native"), (86, "native"), (89, "native"), (90, "native"), (100, "native"), (103, "native"), (120, "native"),
        (121, "no kernel image"), (101, "no kernel image"), (75, "no kernel image"),
    ],
)  # fmt: skip
def test_which_gpu_runs_it(sm: int, expected: str) -> None:
    """Machine code serves its generation upwards; architecture-specific code (the 'a') exactly its own: SM121 gets none."""
    assert fatbin.outlook(fatbin.device_code(spatial_ops()), sm) == expected


def test_ptx_is_compiled_for_newer_gpus_and_specific_ptx_is_not() -> None:
    """compute_90 PTX is a kernel for SM120 through the driver; compute_90a PTX for SM90 alone."""
    plain = fatbin.device_code(elf(dot_nv_fatbin=container(entry(64, 90, 0x11, kind=1))))
    specific = fatbin.device_code(elf(dot_nv_fatbin=container(entry(64, 90, 0x100011, kind=1))))
    assert plain[0].name == "compute_90" and specific[0].name == "compute_90a"
    assert [fatbin.outlook(plain, sm) for sm in (80, 90, 120)] == ["no kernel image", "jit", "jit"]
    assert [fatbin.outlook(specific, sm) for sm in (90, 120)] == ["jit", "no kernel image"]


def test_a_library_without_device_code_has_none_and_does_not_fail() -> None:
    """A plain shared object is 'no device code', not 'no kernel image'."""
    code = fatbin.device_code(elf(dot_text=b"\x90" * 8))
    assert code == [] and fatbin.outlook(code, 90) == "no device code"


def test_kernels_for_a_part_of_the_architectures_are_told() -> None:
    """Two kernels for SM90 and one for SM100: on SM100 a kernel is missing though the library loads."""
    data = elf(dot_nv_fatbin=container(entry(64, 90, 0x11), entry(64, 100, 0x11)) + container(entry(64, 90, 0x11)))
    code = fatbin.device_code(data)
    assert fatbin.uneven(code, 100) and not fatbin.uneven(code, 90)


@pytest.mark.parametrize("cut", [0, 5, 40, 63, 200, 400])
def test_a_cut_or_foreign_file_is_refused_or_empty_but_never_guessed(cut: int) -> None:
    """A truncated library raises NotElf; nothing is reported as its architectures."""
    with pytest.raises(fatbin.NotElf):
        fatbin.device_code(spatial_ops()[:cut])


def test_code_that_only_looks_like_a_container_outside_of_its_section_is_not_read() -> None:
    """The magic number in another section (a program that reads fatbins) is no device code."""
    assert fatbin.device_code(elf(dot_rodata=container(entry(*REAL["sm_90"])))) == []


def library(file: str, data: bytes) -> dict[str, object]:
    code = [c.model_dump() for c in fatbin.device_code(data)]
    return {"package": "sglang-kernel", "version": "0.4.5", "file": file, "code": code}


def flash_ops() -> bytes:
    """sm_80, sm_86 and sm_90a: what sglang-kernel 0.4.5's flash_ops carries (372 entries each, one here)."""
    return elf(dot_nv_fatbin=container(entry(64, 80, 0x11), entry(64, 86, 0x11), entry(*REAL["sm_90a"])))


def test_the_traps_of_the_published_wheel_on_four_gpus() -> None:
    """SM90 has all; SM100 and SM120 lack fa3; SM121 lacks everything and cannot start."""
    found = {"libraries": [
        library("sgl_kernel/sm90/common_ops.abi3.so", spatial_ops()), library("sgl_kernel/sm100/common_ops.abi3.so", spatial_ops()),
        library("sgl_kernel/flash_ops.abi3.so", flash_ops()),
    ]}  # fmt: skip
    rows = {r["GPU"]: r for r in kernels.prospects(found)}
    assert rows["SM90"]["without kernels"] == "none" and rows["SM90"]["starts"] == "yes"
    assert rows["SM120"]["without kernels"] == "sgl_kernel/flash_ops.abi3.so" and rows["SM120"]["starts"] == "yes"
    assert rows["SM121"]["starts"] == "no"
    trap = next(t for t in kernels.traps(found, 121) if "common_ops" in t["library"])
    assert "architecture-specific" in trap["why"] and "sm_120a" in trap["why"]


def test_sm100_only_code_is_named_so_on_an_h200() -> None:
    """A library whose code begins at SM100 is an SM100-only trap on SM90."""
    found = {"libraries": [library("pkg/mxfp8.so", elf(dot_nv_fatbin=container(entry(*REAL["sm_100a"]))))]}
    assert kernels.traps(found, 90)[0]["why"].startswith("SM100-only")


@pytest.mark.parametrize(
    ("text", "sm"), [("9.0", 90), ("12.1", 121), ("SM120", 120), ("sm_90a", 90), ("9", None), ("", None), (None, None)]
)
def test_how_an_architecture_may_be_written(text: str | None, sm: int | None) -> None:
    """9.0, SM90 and sm_90a are one; anything else is none."""
    assert kernels.sm_of(text) == sm


def test_a_file_is_read_through_the_same_code(tmp_path: Path) -> None:
    """read_device_code maps the file; an empty one is refused."""
    file = tmp_path / "a.so"
    file.write_bytes(spatial_ops())
    assert len(kernels.read_device_code(file)) == 7
    file.write_bytes(b"")
    with pytest.raises(fatbin.NotElf):
        kernels.read_device_code(file)
