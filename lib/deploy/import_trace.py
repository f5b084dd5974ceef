"""Records which installed files a Python program really opens: imports, shared objects, data, in all its processes.

    PYTHONPATH=<folder with this file as sitecustomize.py> WORKBOOK_IMPORT_TRACE=<folder> python ...

An audit hook sees every open file and loaded library of its process and appends the path to `<folder>/<pid>.txt` at
once, so that a process that is killed has told all up to then. Libraries that C code loads are no audit events: the
process's map is read now and then, and at its end. A path is told once for a process. `WORKBOOK_PRETEND_GPU`
(name, major, minor, number) lets torch say that there are such GPUs, so that import-time branches for CUDA are taken on a machine
without one: whatever then really needs the GPU fails, and what was imported up to there is recorded.

Standard library only: it runs under the Python that is traced, before anything else. Imported, and not run as
sitecustomize, it does nothing. Reads: `read_trace`.
"""

# ruff: noqa: PTH118, PTH208
# pathlib is not imported here: what is imported before the hook is not seen.
from __future__ import annotations

import atexit
import os
import sys


def start(folder: str, prefixes: tuple[str, ...]) -> None:
    """Installs the hook for this process; paths outside `prefixes` are not told."""
    told: set[str] = set()
    events = [0]
    handle = os.open(os.path.join(folder, f"{os.getpid()}.txt"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    state = {"pid": os.getpid(), "handle": handle}

    def tell(path: str) -> None:
        told.add(path)
        if state["pid"] != os.getpid():  # forked: what its parent told was told
            state["pid"] = os.getpid()
            state["handle"] = os.dup(state["handle"])
        os.write(state["handle"], (path + "\n").encode("utf-8", "surrogateescape"))

    def tell_maps() -> None:
        try:
            with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as file:
                paths = {line.rstrip("\n").split(None, 5)[5] for line in file if "/" in line}
        except (OSError, IndexError):
            return
        for path in sorted(paths):
            if path not in told and path.startswith(prefixes):
                tell(path)

    def hook(event: str, args: tuple) -> None:
        if event in ("open", "import"):
            events[0] += 1
            if events[0] % 500 == 0:
                tell_maps()
        if event == "open":
            path = args[0]
        elif event == "import":
            path = args[1]  # set for extension modules alone
        elif event == "ctypes.dlopen":
            path = args[0]
        else:
            return
        if isinstance(path, bytes):
            path = os.fsdecode(path)
        if not isinstance(path, str) or path in told or not path.startswith(prefixes):
            return
        tell(path)

    sys.addaudithook(hook)
    atexit.register(tell_maps)


def pretend_gpu(words: str) -> None:
    """Lets torch, once it is imported, say that the host's GPUs are here."""
    import importlib.machinery

    name, major, minor, number = words.split(",")

    class Patch:
        def find_spec(self, fullname: str, path: object = None, target: object = None) -> object:
            if fullname != "torch.cuda":
                return None
            sys.meta_path.remove(self)  # type: ignore[arg-type]
            spec: object = importlib.machinery.PathFinder.find_spec(fullname, path)  # type: ignore[arg-type]
            loader = getattr(spec, "loader")  # noqa: B009 -- torch.cuda has a spec and a loader, or nothing goes on
            execute = loader.exec_module

            def exec_module(module: object) -> None:
                execute(module)
                properties = type("Properties", (), {
                    "name": name, "major": int(major), "minor": int(minor), "total_memory": 140 << 30, "gcnArchName": "",
                    "multi_processor_count": 132, "warp_size": 32, "L2_cache_size": 60 << 20,
                    "shared_memory_per_block_optin": 227 << 10, "shared_memory_per_multiprocessor": 228 << 10,
                    "regs_per_multiprocessor": 65536, "max_threads_per_multi_processor": 2048,
                })()  # fmt: skip
                changes: dict[str, object] = {}
                changes["is_available"] = lambda: True
                changes["device_count"] = lambda: int(number)
                changes["current_device"] = lambda: 0
                changes["get_device_capability"] = lambda device=None: (int(major), int(minor))
                changes["get_device_name"] = lambda device=None: name
                changes["get_device_properties"] = lambda device=None: properties
                changes["mem_get_info"] = lambda device=None: (130 << 30, 140 << 30)
                for what, value in changes.items():
                    setattr(module, what, value)

            loader.exec_module = exec_module
            return spec

    sys.meta_path.insert(0, Patch())  # type: ignore[arg-type]


def read_trace(folder: str) -> list[str]:
    """Every path that the processes of a trace told, sorted."""
    found: set[str] = set()
    for name in os.listdir(folder):
        if name.endswith(".txt"):
            with open(os.path.join(folder, name), encoding="utf-8", errors="surrogateescape") as file:
                found.update(line.rstrip("\n") for line in file if line.endswith("\n"))
    return sorted(found)


if __name__ == "sitecustomize":
    if os.environ.get("WORKBOOK_IMPORT_TRACE"):
        start(
            os.environ["WORKBOOK_IMPORT_TRACE"],
            tuple(os.environ.get("WORKBOOK_IMPORT_PREFIXES", sys.prefix).split(os.pathsep)),
        )
    if os.environ.get("WORKBOOK_PRETEND_GPU"):
        pretend_gpu(os.environ["WORKBOOK_PRETEND_GPU"])
