"""Installs the bundle that it lies in, on a host without a network: verify every part, unpack, verify every file.

    python3 install.py DIR [--also FOLDER ...]

DIR becomes a folder for PYTHONPATH. Parts may lie in several folders (`--also FOLDER`), where a bundle was carried in
several goes. Nothing is written outside DIR; DIR gets its name by a rename after everything was verified, so a folder of
that name is a whole installation. Standard library only.
"""

import argparse
import hashlib
import json
import lzma
import os
import shutil
import sys
import tarfile
import time

MANIFEST = "bundle.json"
HERE = os.path.dirname(os.path.abspath(__file__))


class Refused(Exception):
    """The bundle is not whole, or not for this machine."""


def sha256(path):
    """The SHA-256 of a file, in hex."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        for block in iter(lambda: file.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()


class Joined:
    """The pieces of one archive, read one after the other."""

    def __init__(self, paths):
        self.paths, self.file = list(paths), None

    def read(self, size=-1):
        """The next bytes; empty at the end of the last piece."""
        while True:
            if self.file is None:
                if not self.paths:
                    return b""
                self.file = open(self.paths.pop(0), "rb")
            block = self.file.read(size)
            if block:
                return block
            self.file.close()
            self.file = None


def located(manifest, folders):
    """The path of every part by name; Refused lists all that are missing or differ."""
    found, wrong = {}, []
    for archive in manifest["archives"]:
        for part in archive["parts"]:
            name = part["name"]
            paths = [os.path.join(f, name) for f in folders if os.path.isfile(os.path.join(f, name))]
            if not paths:
                wrong.append("%s is missing" % name)
            elif os.path.getsize(paths[0]) != part["bytes"]:
                wrong.append("%s has %d bytes instead of %d" % (name, os.path.getsize(paths[0]), part["bytes"]))
            elif sha256(paths[0]) != part["sha256"]:
                wrong.append("%s has another SHA-256 than %s says" % (name, MANIFEST))
            else:
                found[name] = paths[0]
    if wrong:
        raise Refused("; ".join(sorted(wrong)))
    return found


def unsuitable(target):
    """Why this machine is not the one that the bundle was made for; empty if it is."""
    here = "%d.%d" % sys.version_info[:2]
    wrong = []
    if here != target["python"]:
        wrong.append("it is for Python %s, this is %s" % (target["python"], here))
    if os.uname().machine != target["machine"]:
        wrong.append("it is for %s, this is %s" % (target["machine"], os.uname().machine))
    return wrong


def unpack(archive, paths, folder, expected):
    """Unpacks one archive below `folder`; returns what is wrong with its files."""
    wrong, seen = [], set()
    with lzma.LZMAFile(Joined([paths[part["name"]] for part in archive["parts"]]), "rb") as stream:
        with tarfile.open(fileobj=stream, mode="r|") as tar:
            for member in tar:
                name = member.name
                want = expected.get(name)
                if want is None or not member.isfile() or name.startswith("/") or ".." in name.split("/"):
                    wrong.append("%s is not in %s" % (name, MANIFEST))
                    continue
                data = tar.extractfile(member).read()
                seen.add(name)
                if hashlib.sha256(data).hexdigest() != want[0]:
                    wrong.append("%s has another SHA-256 than %s says" % (name, MANIFEST))
                    continue
                path = os.path.join(folder, name)
                os.makedirs(os.path.dirname(path), exist_ok=True)
                with open(path, "wb") as file:
                    file.write(data)
                os.chmod(path, 0o755 if want[2] else 0o644)
    wrong += ["%s is not in the archive" % name for name, row in expected.items() if row[3] == archive["name"] and name not in seen]
    return wrong


def write_interpreter(path, site):
    """A command that is this Python with the bundle on its path: what `server.python` of a profile can name.

    A link would not do: a virtual environment is found by the place of its interpreter.
    """
    quoted = ["'" + word.replace("'", "'\\''") + "'" for word in (site, sys.executable)]
    with open(path, "w", encoding="utf-8") as file:
        file.write("#!/bin/sh\nPYTHONPATH=%s${PYTHONPATH:+:$PYTHONPATH} exec %s \"$@\"\n" % tuple(quoted))
    os.chmod(path, 0o755)


def install(target, folders):
    """Verifies and unpacks; returns the manifest.

    Raises:
        Refused: lists all that is wrong; nothing of the name `target` is left.
    """
    with open(os.path.join(HERE, MANIFEST), encoding="utf-8") as file:
        manifest = json.load(file)
    wrong = unsuitable(manifest["target"])
    if wrong:
        raise Refused("; ".join(wrong))
    paths = located(manifest, folders)
    fresh = "%s.unpacking-%d" % (target.rstrip("/"), os.getpid())
    os.makedirs(fresh)
    try:
        expected = manifest["files"]
        jobs = []
        # processes, not threads: unpacking is bound by the decompressor, which holds the interpreter for hashing too
        for archive in manifest["archives"]:
            child = os.fork()
            if not child:
                code = 1
                try:
                    faults = unpack(archive, paths, fresh, expected)
                    with open(os.path.join(fresh, ".faults-%s" % archive["name"]), "w", encoding="utf-8") as file:
                        json.dump(faults, file)
                    code = 0
                except (OSError, lzma.LZMAError, tarfile.TarError, EOFError) as error:
                    with open(os.path.join(fresh, ".faults-%s" % archive["name"]), "w", encoding="utf-8") as file:
                        json.dump(["%s: %s: %s" % (archive["name"], type(error).__name__, error)], file)
                    code = 0
                finally:
                    os._exit(code)
            jobs.append((archive, child))
        for archive, child in jobs:
            _, status = os.waitpid(child, 0)
            report = os.path.join(fresh, ".faults-%s" % archive["name"])
            if status or not os.path.exists(report):
                wrong.append("unpacking %s ended with status %d" % (archive["name"], status))
                continue
            with open(report, encoding="utf-8") as file:
                wrong += json.load(file)
            os.unlink(report)
        if wrong:
            raise Refused("; ".join(wrong[:20]) + (" and %d more" % (len(wrong) - 20) if len(wrong) > 20 else ""))
        shutil.copy(os.path.join(HERE, MANIFEST), os.path.join(fresh, MANIFEST))
        write_interpreter(os.path.join(fresh, "python"), os.path.abspath(target))
        if os.path.isdir(target):
            shutil.rmtree(target)
        os.rename(fresh, target)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise
    return manifest


def main(arguments):
    """0 installed, 2 refused."""
    parser = argparse.ArgumentParser(description="Verify and unpack this bundle into a folder for PYTHONPATH.")
    parser.add_argument("target", metavar="DIR")
    parser.add_argument("--also", action="append", default=[], metavar="FOLDER", help="another folder with parts")
    args = parser.parse_args(arguments)
    began = time.monotonic()
    try:
        manifest = install(args.target, [HERE, *args.also])
    except Refused as error:
        sys.stderr.write("install: not installed: %s.\n" % error)
        return 2
    sys.stdout.write(
        "install: %d files of %d packages verified and unpacked into %s in %.1f s\n"
        % (len(manifest["files"]), len(manifest["packages"]), args.target, time.monotonic() - began)
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
