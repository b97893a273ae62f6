"""A program, `python -I -S ends_with_parent.py PARENT SIGNAL COMMAND...`: becomes COMMAND, which
gets SIGNAL when its parent process ends.

Only the process itself can request that. Doing it in a fork of the parent (`preexec_fn`) may hang
if the parent has threads.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # of <sys/prctl.h>


def end_with_parent(parent: int, at_its_end: int) -> None:
    """Makes this process receive the signal `at_its_end` when its parent process ends; exits now if
    the parent has already ended."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, at_its_end)
    if os.getppid() != parent:  # it ended before the kernel knew
        os._exit(128 + at_its_end)


def main() -> None:
    parent, at_its_end, *command = sys.argv[1:]
    end_with_parent(int(parent), int(at_its_end))
    for number in (
        signal.SIGPIPE,
        signal.SIGXFSZ,
    ):  # Python ignores them, and a command inherits that
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)
        sys.exit(127)  # as in a shell


if __name__ == "__main__":
    main()
