"""Runs a program on simulated GPUs: python -m simulated_gpu -m MODULE ..., or SCRIPT ...

SIMULATED_GPUS: how many there are, 1 to 8. Python programs that it starts have them too. At the end
it prints what the host waited for, which threads used which device, and unordered uses of memory,
on the standard error.
"""

from __future__ import annotations

import atexit
import os
import runpy
import sys
from pathlib import Path
from typing import NoReturn

from simulated_gpu.load import start
from simulated_gpu.record import Recorder

SITE = Path(__file__).with_name("site")  # read by each Python at its start


def main() -> None:
    recorder = start().recorder
    path = (str(SITE), os.environ.get("PYTHONPATH", ""))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    recorder.is_watching = True
    atexit.register(show, recorder)
    leave = os._exit

    def leave_with_a_report(code: int) -> NoReturn:
        show(recorder)
        leave(code)

    os._exit = leave_with_a_report  # type: ignore[assignment]
    words = sys.argv[1:]
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path.insert(0, str(Path(words[0]).parent))
        runpy.run_path(words[0], run_name="__main__")


def show(recorder: Recorder) -> None:
    lines = [
        *(
            f"waited {count} x: {wait.what} at {wait.place}, {wait.thread}"
            for wait, count in recorder.waits.most_common()
        ),
        *(f"thread {thread} used cuda:{device}" for thread, device in sorted(recorder.devices)),
        *(f"race: {race}" for race in recorder.races),
    ]
    print("\n".join(["simulated GPU:", *lines]), file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
