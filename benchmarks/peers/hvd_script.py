"""Plain Horovod: hvd.DistributedOptimizer around torch's SGD, data sharded by rank.

mpirun -np 2 python benchmarks/peers/hvd_script.py --root DIR
"""

from __future__ import annotations

import horovod
import horovod.torch as hvd
import torch
from data import LR, MOMENTUM, Clock, images, network, normalized, parser, shards
from torch.nn import functional


def main() -> None:
    options = parser(__doc__).parse_args()
    hvd.init()
    rank = hvd.rank()
    size = hvd.size()
    batches = shards(images(options.root), rank, size, options.batch // size)
    model = network(options.dropout).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM, fused=True)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
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

    clock = Clock(options, hvd.allgather_object)
    clock.run(block)
    clock.print_result(rank, "horovod", {"horovod": horovod.__version__})


if __name__ == "__main__":
    main()
