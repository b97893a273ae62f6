"""hvdtrain's command line, whose torchdist engine reduces tensors on a GPU by Gloo: NCCL refuses
two ranks on one GPU."""

from __future__ import annotations

from hvdtrain.comm import torchdist


def main() -> None:
    torchdist.has_nccl = lambda: False
    from hvdtrain.__main__ import script

    script()


if __name__ == "__main__":
    main()
