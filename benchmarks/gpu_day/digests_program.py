"""Digests of tensors, computed where they lie, beside those of the host: {"gb_per_s": ..., ...}.

python benchmarks/gpu_day/digests_program.py MEGABYTES
"""

from __future__ import annotations

import json
import statistics
import sys
import time

import torch

from hvdtrain.frameworks.torch.device_digest import sum_of_bytes

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.uint8)
ROUNDS = 5


def main(megabytes: str) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    size_bytes = int(float(megabytes) * 1e6) + 3  # not a whole number of words
    generator = torch.Generator().manual_seed(1)
    data = torch.randint(0, 256, (size_bytes,), dtype=torch.uint8, generator=generator)
    other = [str(dtype) for dtype in DTYPES if not is_same(data, dtype, device)]
    on_device = data.to(device)
    changed = on_device.clone()
    changed[size_bytes // 2] ^= 1
    host_s = seconds_of(data)
    print(
        json.dumps(
            {
                "megabytes": float(megabytes),
                "other_on_the_host": other,
                "notices_a_bit": int(sum_of_bytes(changed)) != int(sum_of_bytes(on_device)),
                "gb_per_s": size_bytes / seconds_of(on_device) / 1e9,
                "host_gb_per_s": size_bytes / host_s / 1e9,
            }
        )
    )


def is_same(data: torch.Tensor, dtype: torch.dtype, device: torch.device) -> bool:
    width = torch.empty((), dtype=dtype).element_size()
    numbers = data[: len(data) // width * width].view(dtype)
    return int(sum_of_bytes(numbers.to(device))) == int(sum_of_bytes(numbers))


def seconds_of(data: torch.Tensor) -> float:
    """The median of some rounds, each until the host has the digest."""
    times = []
    for _ in range(ROUNDS):
        began_s = time.perf_counter()
        int(sum_of_bytes(data))
        times.append(time.perf_counter() - began_s)
    return statistics.median(times)


if __name__ == "__main__":
    main(*sys.argv[1:])
