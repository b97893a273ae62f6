"""hvdtrain on ranks that SIGKILL themselves: python tests/support/killed_ranks.py PLAN ARGUMENTS of
hvdtrain ...

PLAN: "2 step 7, 0 evaluate 1": rank 2 at the seventh call of a function called `step` in its
process, in any thread. With a file before the name only that file's: "1 mpi.py:shrink 1". A time
after the call delays the kill by so many seconds ("2 step 7 0.5"), so that the other ranks already
wait. Ranks are the launcher's. "-": no rank.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from hvdtrain.__main__ import main
from hvdtrain.comm.launcher_variables import placement


class Kill(NamedTuple):
    """When a rank is killed."""

    rank: int
    function: str
    call: int
    pause_s: float = 0.0

    def is_of(self, frame: FrameType) -> bool:
        file, _, name = self.function.rpartition(":")
        return frame.f_code.co_name == name and (
            not file or Path(frame.f_code.co_filename).name == file
        )


def parse(plan: str) -> list[Kill]:
    kills = [words.split() for words in plan.split(",") if words.strip() not in ("", "-")]
    return [
        Kill(int(rank), function, int(call), *map(float, pause))
        for rank, function, call, *pause in kills
    ]


def die_at(kills: list[Kill]) -> None:
    """Kills this process at the first of these calls."""
    if not kills:
        return
    calls = dict.fromkeys(kills, 0)

    def look(frame: FrameType, event: str, argument: Any) -> None:
        if event != "call":
            return
        for kill in kills:
            if kill.is_of(frame):
                calls[kill] += 1
                if calls[kill] == kill.call:
                    time.sleep(kill.pause_s)
                    os.kill(os.getpid(), signal.SIGKILL)

    threading.setprofile(look)
    sys.setprofile(look)


if __name__ == "__main__":
    rank = placement(os.environ).rank
    die_at([kill for kill in parse(sys.argv[1]) if kill.rank == rank])
    sys.argv = ["hvdtrain", *sys.argv[2:]]
    sys.exit(main())
