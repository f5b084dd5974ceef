"""Installs the bundle that it lies in, on a host without a network: verify every part, unpack, verify every file.

    python3 install.py DIR [--also FOLDER ...]

DIR becomes a folder for PYTHONPATH, and `DIR/python` a command that is this Python with it. Parts may lie in several
folders (`--also`), where a bundle was carried in several goes. Nothing is written outside of DIR; it gets its name by a
rename after everything was verified, so a folder of that name is a whole installation. Standard library only.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import os
import shutil
import sys
import tarfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

MANIFEST = "bundle.json"
HERE = Path(__file__).resolve().parent


class Refused(Exception):
    """The bundle is not whole, or not for this machine."""


def sha256(path: Path) -> str:
    """The SHA-256 of a file, in hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for block in iter(lambda: file.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()


class Joined:
    """The pieces of one archive, read one after the other."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = list(paths)
        self.file: BinaryIO | None = None

    def read(self, size: int = -1) -> bytes:
        """The next bytes; empty at the end of the last piece."""
        while True:
            if self.file is None:
                if not self.paths:
                    return b""
                self.file = self.paths.pop(0).open("rb")  # noqa: SIM115 -- closed below, when it is read
            block = self.file.read(size)
            if block:
                return block
            self.file.close()
            self.file = None


def located(manifest: Mapping[str, Any], folders: Sequence[Path]) -> dict[str, Path]:
    """The path of every part by name; Refused lists all that are missing or differ."""
    found, wrong = {}, []
    for archive in manifest["archives"]:
        for part in archive["parts"]:
            name = part["name"]
            paths = [folder / name for folder in folders if (folder / name).is_file()]
            if not paths:
                wrong.append(f"{name} is missing")
            elif paths[0].stat().st_size != part["bytes"]:
                wrong.append(f"{name} has {paths[0].stat().st_size} bytes instead of {part['bytes']}")
            elif sha256(paths[0]) != part["sha256"]:
                wrong.append(f"{name} has another SHA-256 than {MANIFEST} says")
            else:
                found[name] = paths[0]
    if wrong:
        raise Refused("; ".join(sorted(wrong)))
    return found


def unsuitable(target: Mapping[str, str]) -> list[str]:
    """Why this machine is not the one that the bundle was made for; empty if it is."""
    here = f"{sys.version_info[0]}.{sys.version_info[1]}"
    wrong = []
    if here != target["python"]:
        wrong.append(f"it is for Python {target['python']}, this is {here}")
    if os.uname().machine != target["machine"]:
        wrong.append(f"it is for {target['machine']}, this is {os.uname().machine}")
    return wrong


def unpack(archive: Mapping[str, Any], paths: Mapping[str, Path], folder: Path, expected: Mapping[str, Sequence[Any]]) -> list[str]:
    """Unpacks one archive below `folder`; returns what is wrong with its files."""
    wrong, seen = [], set()
    joined = cast("BinaryIO", Joined([paths[part["name"]] for part in archive["parts"]]))
    with lzma.LZMAFile(joined, "rb") as stream, tarfile.open(fileobj=stream, mode="r|") as tar:
        for member in tar:
            name, want = member.name, expected.get(member.name)
            content = tar.extractfile(member) if member.isfile() else None
            if want is None or content is None or name.startswith("/") or ".." in name.split("/"):
                wrong.append(f"{name} is not in {MANIFEST}")
                continue
            data = content.read()
            seen.add(name)
            if hashlib.sha256(data).hexdigest() != want[0]:
                wrong.append(f"{name} has another SHA-256 than {MANIFEST} says")
                continue
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
            path.chmod(0o755 if want[2] else 0o644)
    return wrong + [f"{name} is not in the archive" for name, row in expected.items() if row[3] == archive["name"] and name not in seen]


def unpack_beside(
    archive: Mapping[str, Any], paths: Mapping[str, Path], folder: Path, expected: Mapping[str, Sequence[Any]], report: Path
) -> int:
    """Starts a process that unpacks one archive and reports what is wrong; its pid.

    Processes, not threads: decompressing and hashing take turns on one interpreter.
    """
    child = os.fork()
    if child:
        return child
    try:
        try:
            faults = unpack(archive, paths, folder, expected)
        except (OSError, lzma.LZMAError, tarfile.TarError, EOFError) as error:
            faults = [f"{archive['name']}: {type(error).__name__}: {error}"]
        report.write_text(json.dumps(faults), encoding="utf-8")
    finally:
        os._exit(0)


def write_interpreter(path: Path, site: Path) -> None:
    """A command that is this Python with the bundle on its path: what `server.python` of a profile can name.

    A link would not do: a virtual environment is found by the place of its interpreter.
    """
    there, python = ("'" + word.replace("'", "'\\''") + "'" for word in (str(site), sys.executable))
    path.write_text(f'#!/bin/sh\nPYTHONPATH={there}${{PYTHONPATH:+:$PYTHONPATH}} exec {python} "$@"\n', encoding="utf-8")
    path.chmod(0o755)


def install(target: Path, folders: Sequence[Path]) -> dict[str, Any]:
    """Verifies and unpacks; returns the manifest.

    Raises:
        Refused: lists all that is wrong; what was there under that name before is still there.
    """
    manifest: dict[str, Any] = json.loads((folders[0] / MANIFEST).read_text(encoding="utf-8"))
    wrong = unsuitable(manifest["target"])
    if wrong:
        raise Refused("; ".join(wrong))
    paths = located(manifest, folders)
    fresh = target.with_name(f"{target.name}.unpacking-{os.getpid()}")
    fresh.mkdir(parents=True)
    try:
        reports = {archive["name"]: fresh / f".faults-{archive['name']}" for archive in manifest["archives"]}
        children = {
            unpack_beside(archive, paths, fresh, manifest["files"], reports[archive["name"]]): archive["name"]
            for archive in manifest["archives"]
        }
        for pid, name in children.items():
            _, status = os.waitpid(pid, 0)
            if status or not reports[name].exists():
                wrong.append(f"unpacking {name} ended with status {status}")
            else:
                wrong += json.loads(reports[name].read_text(encoding="utf-8"))
                reports[name].unlink()
        if wrong:
            more = f" and {len(wrong) - 20} more" if len(wrong) > 20 else ""
            raise Refused("; ".join(wrong[:20]) + more)
        shutil.copy(folders[0] / MANIFEST, fresh / MANIFEST)
        write_interpreter(fresh / "python", target)
        if target.is_dir():
            shutil.rmtree(target)
        fresh.rename(target)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise
    return manifest


def main(arguments: Sequence[str]) -> int:
    """0 installed, 2 refused."""
    parser = argparse.ArgumentParser(description="Verify and unpack this bundle into a folder for PYTHONPATH.")
    parser.add_argument("target", metavar="DIR", type=Path)
    parser.add_argument("--also", action="append", default=[], metavar="FOLDER", type=Path, help="another folder with parts")
    args = parser.parse_args(arguments)
    began = time.monotonic()
    try:
        manifest = install(args.target.absolute(), [HERE, *args.also])
    except Refused as error:
        sys.stderr.write(f"install: not installed: {error}.\n")
        return 2
    sys.stdout.write(
        f"install: {len(manifest['files'])} files of {len(manifest['packages'])} packages verified and unpacked into {args.target} "
        f"in {time.monotonic() - began:.1f} s\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
