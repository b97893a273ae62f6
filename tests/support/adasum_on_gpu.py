"""Runs on 2 ranks that share a GPU: Adasum of tensors that stay there, as NCCL leaves them, and
messages by way of the host."""

from __future__ import annotations

import os

import numpy as np
import torch

from hvdtrain.comm import mpi
from hvdtrain.comm.launcher_variables import placement
from hvdtrain.horovod.engine.reduce import adasum_


def main() -> None:
    communicator = mpi.connect(placement(os.environ))
    for length in (1, 2, 37):
        a, b = (np.sin(np.arange(1.0, length + 1) * (rank + 1)) for rank in range(2))
        flat = torch.from_numpy((a, b)[communicator.rank]).cuda()
        adasum_(communicator, flat, f"of {length}")
        expected = (1 - a @ b / (2 * (a @ a))) * a + (1 - a @ b / (2 * (b @ b))) * b
        assert flat.is_cuda and np.allclose(flat.cpu().numpy(), expected, rtol=1e-14, atol=1e-14), (
            flat,
            expected,
        )
    print("as by the formula")


if __name__ == "__main__":
    main()
