"""One task in a process of its own, started by a worker elsewhere; `lib.batch.execute` does the work.

    python -m lib.batch.one_task PARENT_PID          (one JSON line on standard input: task, outputs, attempt)

Standard output has lines that begin with `MARK`: progress as it comes, at the end the record or what stood in the way.
A process of its own, because a task forks, and forking a worker with its threads and connections is asking for trouble;
and because it can then be ended from outside, like a task on this machine by Ctrl-C. It ends when its worker ends.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading
from types import FrameType
from typing import Any

from lib.batch.execute import execute_task
from lib.batch.tasks import Task
from lib.errors import WorkbookError

MARK = "\x1eworkbook "
PR_SET_PDEATHSIG = 1
#: Ended by a signal, its servers gone.
INTERRUPTED = 130


def _end(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _die_with(parent: int) -> None:
    """End as by Ctrl-C when the worker that started this process ends."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _end)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:
        raise KeyboardInterrupt


def main(argv: list[str]) -> int:
    """Run the task that standard input names; 0 when there is a record, whatever it says."""
    lock = threading.Lock()

    def tell(**what: Any) -> None:
        with lock:
            sys.stdout.write(f"{MARK}{json.dumps(what)}\n")
            sys.stdout.flush()

    try:
        _die_with(int(argv[0]))
        asked = json.loads(sys.stdin.readline())
        task = Task.model_validate(asked["task"])
        record = execute_task(task, asked["outputs"], asked["attempt"], say=lambda text: tell(progress=text))
        tell(record=record.model_dump(mode="json"))
    except WorkbookError as error:
        tell(error=str(error))
        return error.exit_code
    except OSError as error:  # a full disk, a folder that is not to be written: another machine may have room
        tell(error=f"{error.strerror or error} ({error.filename or 'no file named'})")
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
