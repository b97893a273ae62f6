"""torch's DistributedDataParallel over Gloo, data sharded by rank.

mpirun -np 2 python benchmarks/peers/ddp_gloo.py --root DIR        rendezvous: MASTER_ADDR:MASTER_PORT, default 127.0.0.1:29511
"""  # noqa: E501

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from data import DDP, LR, MOMENTUM, Clock, images, network, normalized, parser, shards, take_rank
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel


def gather(numbers: list[float]) -> list[list[float]]:
    """Each rank's numbers, in rank order."""
    rows: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(rows, numbers)
    return rows


def main() -> None:
    options = parser(__doc__).parse_args()
    rank, size = take_rank()
    dist.init_process_group("gloo")
    batches = shards(images(options.root), rank, size, options.batch // size)
    model = DistributedDataParallel(network(options.dropout).train(), **DDP)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM, fused=True)
    torch.manual_seed(rank)  # dropout: each rank's own

    def block(steps: int) -> float:
        loss_sum = torch.zeros(())
        for _ in range(steps):
            x, y = next(batches)
            with torch.autocast("cpu", torch.bfloat16, enabled=options.precision == "bf16"):
                logits = model(normalized(x))
            loss = functional.cross_entropy(logits.float(), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            loss_sum += loss.detach()
        return float(loss_sum) / steps

    clock = Clock(options, gather)
    clock.run(block)
    clock.print_result(rank, "ddp gloo", {})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
