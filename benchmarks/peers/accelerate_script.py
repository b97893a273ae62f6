"""Hugging Face Accelerate on CPU processes over Gloo, a DataLoader over a TensorDataset.

mpirun -np 2 python benchmarks/peers/accelerate_script.py --root DIR        needs: pip install -c constraints.txt accelerate
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import accelerate
import torch
import torch.distributed as dist
from accelerate import Accelerator, DistributedDataParallelKwargs
from data import DDP, LR, MOMENTUM, Clock, images, network, normalized, parser, take_rank
from ddp_gloo import gather
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset


def endless(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def main() -> None:
    options = parser(__doc__).parse_args()
    rank, size = take_rank()
    accelerator = Accelerator(
        cpu=True,
        mixed_precision="bf16" if options.precision == "bf16" else "no",
        kwargs_handlers=[DistributedDataParallelKwargs(**DDP)],
    )
    assert dist.get_backend() == "gloo", dist.get_backend()
    loader: Any = DataLoader(
        TensorDataset(*images(options.root)), options.batch // size, shuffle=True, drop_last=True
    )
    model: Any = network(options.dropout)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM, fused=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    torch.manual_seed(rank)  # dropout: each rank's own
    model.train()
    batches = endless(loader)

    def block(steps: int) -> float:
        loss_sum = torch.zeros(())
        for _ in range(steps):
            x, y = next(batches)
            loss = functional.cross_entropy(model(normalized(x)).float(), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            loss_sum += loss.detach()
        return float(loss_sum) / steps

    clock = Clock(options, gather)
    clock.run(block)
    clock.print_result(rank, "accelerate", {"accelerate": accelerate.__version__})
    accelerator.end_training()


if __name__ == "__main__":
    main()
