"""python -m hvdtrain.cli.launch.rank [--plain] [--logs DIR] script|module|program WORD ...: one rank of `launch -- train.py`."""

from __future__ import annotations

import argparse
import os
import sys

from hvdtrain.cli.launch.rank.run_script import run_module, run_program, run_script
from hvdtrain.cli.launch.rank.watched import Watched, log_of
from hvdtrain.comm.placement import placement
from hvdtrain.errors import UserError


def main() -> int:
    """Runs the words; returns their exit code. `launch` has checked what the user gave."""
    parser = argparse.ArgumentParser(prog="hvdtrain.cli.launch.rank", allow_abbrev=False)
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--logs")
    parser.add_argument("kind", choices=("script", "module", "program"))
    parser.add_argument("words", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    try:
        rank = placement(os.environ).rank
        log = log_of(options.logs, rank)
    except UserError as error:
        print(f"hvdtrain: {error}", file=sys.stderr)
        return error.code
    tag = b"" if options.plain else f"[{rank}] ".encode()
    run = {"script": run_script, "module": run_module, "program": run_program}[options.kind]
    return Watched(lambda tell: run(options.words, rank, tell), prints_calls=options.kind != "program").run(tag, log)


if __name__ == "__main__":
    sys.exit(main())
