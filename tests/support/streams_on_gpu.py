"""A script of ranks that share a GPU, which asks on one stream, waits on another one, and uses the
memory of both again."""

from __future__ import annotations

import math

import torch

import hvdtrain.horovod as hvd

CYCLES = 100_000_000  # about 50 ms, during which the tensor to reduce is not ready


def main() -> None:
    hvd.init()
    torch.cuda.set_device(0)
    asks = torch.cuda.Stream()
    waits = torch.cuda.Stream()
    total = hvd.size() * (hvd.size() + 1) // 2
    for length in (2000, 1_000_000):  # fused in a buffer; alone, in place
        for _ in range(3):
            with torch.cuda.stream(asks):
                late = torch.full((length,), math.nan, device="cuda")
                torch.cuda._sleep(CYCLES)
                late.copy_(torch.full_like(late, hvd.rank() + 1))
                changed = late.clone()
                handles = {
                    "allreduce": (hvd.allreduce_async(late, op=hvd.Sum), total * length),
                    "allreduce_": (hvd.allreduce_async_(changed, op=hvd.Sum), total * length),
                    "broadcast": (hvd.broadcast_async(late, 0), length),
                    "allgather": (hvd.allgather_async(late), total * length),
                    "reducescatter": (
                        hvd.reducescatter_async(late, op=hvd.Sum),
                        total * length // hvd.size(),
                    ),
                }
                del late, changed
            for name, (handle, expected) in handles.items():
                with torch.cuda.stream(waits):
                    found = hvd.synchronize(handle)
                    torch.cuda._sleep(CYCLES // 10)
                    sum_of_all = found.double().sum()
                    del found
                with torch.cuda.stream(asks):  # takes memory that is free, if it is too early
                    spoilt = torch.full((2 * length,), math.inf, device="cuda")
                assert float(sum_of_all) == expected, (name, length, float(sum_of_all), expected)
                del spoilt
    print("in order")


if __name__ == "__main__":
    main()
