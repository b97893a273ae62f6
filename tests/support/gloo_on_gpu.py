"""Runs the rest of the command line as a program whose torchdist engine reduces GPU tensors with
Gloo.

Two ranks can then share a GPU, which NCCL rejects. Otherwise hvdtrain handles device tensors
exactly as with NCCL.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from hvdtrain.comm import torchdist


def main() -> None:
    torchdist.BACKENDS = "cpu:gloo,cuda:gloo"
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
