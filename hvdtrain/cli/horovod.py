"""python -m hvdtrain.cli.horovod: runs `hvdtrain horovod` before the packages of a job are
installed.

In a copy without the extra that builds Horovod, the command that `make` runs exits with 0.
"""

import importlib
import sys

from hvdtrain.core.extras import commands
from hvdtrain.errors import DONE, USER

_NAME = "horovod"


def main() -> int:
    """Returns the exit code."""
    if _NAME not in commands():
        print("Horovod is left out: this copy of hvdtrain has no extra that builds it")
        return DONE if {"--or-without", "--copy-to"} & set(sys.argv) else USER
    command = getattr(importlib.import_module(commands()[_NAME].module), _NAME)
    return int(command(sys.argv[1:], "python -m hvdtrain.cli.horovod"))


if __name__ == "__main__":
    sys.exit(main())
