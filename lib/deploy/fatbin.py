"""Which GPU architectures a shared object carries code for, read from its own bytes; and which GPUs that code runs on.

nvcc puts device code into the ELF sections `.nv_fatbin` and `__nv_relfatbin`: containers with a 16-byte header (magic
0xBA55ED50, version 1, header size, size of what follows), each with entries one after the other: kind (1 PTX, 2 machine
code), header size, payload size and the architecture's number at byte 28; bit 20 of the flags at byte 40 says
"architecture-specific" (the 'a' of sm_90a). Checked against cuobjdump 13 and nvcc's own -gencode list on sglang-kernel
0.4.5's shared objects (tests/deploy/test_fatbin.py). Bytes in, records out.

Rules of what runs where: machine code for X.Y runs on X.Z with Z >= Y; architecture-specific code on exactly X.Y; PTX
is compiled by the driver for X.Y and everything newer, architecture-specific PTX for X.Y alone.
Source: CUDA C++ Programming Guide, "Compute Capability" and "Family- and architecture-specific features".
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from mmap import mmap

from lib.records import Record

Buffer = bytes | mmap

MAGIC = struct.pack("<I", 0xBA55ED50)
SECTIONS = (b".nv_fatbin", b"__nv_relfatbin")
SPECIFIC = 1 << 20
KINDS = {1: "ptx", 2: "sass"}


class DeviceCode(Record):
    """Code for one architecture: `sm` 90 is compute capability 9.0; `specific` is the 'a' of sm_90a; how many entries."""

    kind: str
    sm: int
    specific: bool
    entries: int = 1

    @property
    def name(self) -> str:
        """As nvcc writes it: sm_90a, compute_80."""
        return f"{'sm' if self.kind == 'sass' else 'compute'}_{self.sm}{'a' if self.specific else ''}"

    def runs_on(self, sm: int) -> bool:
        """Whether a device of that compute capability can run it."""
        if self.specific:
            return sm == self.sm
        return sm >= self.sm and (self.kind == "ptx" or sm // 10 == self.sm // 10)


class NotElf(ValueError):
    """The bytes are not a 64-bit little-endian ELF file, or end too early."""


def sections(data: Buffer) -> Iterator[tuple[bytes, int, int]]:
    """Name, offset and size of every section of an ELF file.

    Raises:
        NotElf: it is none, or its section table lies outside of the bytes.
    """
    if bytes(data[:6]) != b"\x7fELF\x02\x01" or len(data) < 64:
        raise NotElf("no 64-bit little-endian ELF header")
    table, entry, count, names = *struct.unpack_from("<Q", data, 40), *struct.unpack_from("<HHH", data, 58)
    if not table or not count:
        return
    if entry < 64 or table + entry * count > len(data) or names >= count:
        raise NotElf("the section table lies outside of the file")
    rows = [struct.unpack_from("<IIQQQQ", data, table + entry * n) for n in range(count)]
    strings = rows[names]
    for name_at, kind, _flags, _address, offset, size in rows:
        at = strings[4] + name_at
        if at >= len(data):
            raise NotElf("a section's name lies outside of the file")
        name = bytes(data[at : at + 32]).split(b"\0", 1)[0]
        if kind != 8:  # SHT_NOBITS has no bytes in the file
            yield name, offset, min(size, max(0, len(data) - offset))


def entries(data: Buffer, begin: int, end: int) -> Iterator[tuple[int, int, bool]]:
    """Kind, architecture and 'architecture-specific' of every entry of the containers in `data[begin:end]`."""
    at = begin
    while at + 16 <= end:
        if bytes(data[at : at + 4]) != MAGIC:
            at += 4  # containers are aligned; between them there is padding
            continue
        version, header, size = struct.unpack_from("<HHQ", data, at + 4)
        stop = at + header + size
        if version != 1 or header < 16 or stop > end:
            at += 4
            continue
        inner = at + header
        while inner + 64 <= stop:
            kind, _version, entry_header, payload = struct.unpack_from("<HHIQ", data, inner)
            if kind not in KINDS or entry_header < 48:
                break
            yield kind, struct.unpack_from("<I", data, inner + 28)[0], bool(struct.unpack_from("<Q", data, inner + 40)[0] & SPECIFIC)
            inner += entry_header + payload
        at = stop


def device_code(data: Buffer) -> list[DeviceCode]:
    """All device code of a shared object, by architecture; empty for one that has none.

    Raises:
        NotElf: the bytes are no such file.

    Example: sglang-kernel 0.4.5's sm90/common_ops.abi3.so carries sm_80, sm_89, sm_90, sm_90a, sm_100a, sm_103a, sm_120a.
    """
    counts: dict[tuple[str, int, bool], int] = {}
    for name, offset, size in sections(data):
        if name in SECTIONS:
            for kind, sm, specific in entries(data, offset, offset + size):
                key = (KINDS[kind], sm, specific)
                counts[key] = counts.get(key, 0) + 1
    return [DeviceCode(kind=k, sm=s, specific=a, entries=n) for (k, s, a), n in sorted(counts.items())]


def outlook(code: Sequence[DeviceCode], sm: int) -> str:
    """What a device of that compute capability makes of a library: `native`, `jit` (from PTX), `no kernel image`, `no device code`."""
    if not code:
        return "no device code"
    fitting = [c for c in code if c.runs_on(sm)]
    if any(c.kind == "sass" for c in fitting):
        return "native"
    return "jit" if fitting else "no kernel image"


def uneven(code: Sequence[DeviceCode], sm: int) -> bool:
    """Whether only a part of a library's kernels has code for this device: fewer entries than for another architecture.

    Such a library loads, and its missing kernels fail at their first launch.
    """
    here = sum(c.entries for c in code if c.runs_on(sm))
    return bool(here) and here < max((c.entries for c in code), default=0)
