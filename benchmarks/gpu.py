"""All that is measured on a GPU, in parts of at most 8 minutes: first whether it computes what it
should, then how fast.

python benchmarks/gpu.py [--part NAME ...] [--root DIR] [--json FILE] [--quick]

DIR holds FashionMNIST/raw, and cifar-10-batches-bin or a JPEG version of it in train/CLASS and
test/CLASS; images made from counters stand in for a set that is not there, and `data` of a row says
which it was. A line of JSON is appended to FILE (gpu-day.jsonl) for each measurement and for each
part at its end; a table is the last output. A part that fails does not end the others: its error is
in the table, and the exit code is 1. --quick: every part with the smallest sizes, on a CPU too, to
try the script.

benchmarks/performance.md ("One GPU") says what each part does, and how a machine without a network
gets what it needs.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import platform
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
from gpu_day import correctness, speed, waiting
from gpu_day.part import Device, Failed, Part
from step import device_name

from hvdtrain.version import __version__

PARTS: dict[
    str, Callable[[Part], str]
] = {  # in the order in which they run; each returns what the table says of it
    "tests": correctness.tests,
    "losses": correctness.losses,
    "ranks": correctness.ranks,
    "resume": correctness.resume,
    "zero3": correctness.zero3,
    "waits": waiting.waits,
    "digests": waiting.digests,
    "wide_resnet": speed.wide_resnet,
    "accuracy": speed.accuracy,
    "gpt12": functools.partial(speed.gpt, layers=12),
    "gpt24": functools.partial(speed.gpt, layers=24),
    "cifar10": speed.cifar10_speed,
    "folder": speed.folder,
    "energy": speed.energy,
    "segmentation": waiting.segmentation,
    "checkpoint": waiting.checkpoint,
    "pipelines": waiting.pipelines,
    "buckets": waiting.buckets,
}


def main() -> int:
    options = parse()
    device = this_device()
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    versions = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "hvdtrain": __version__,
    }
    with options.json.open("a") as out:
        out.write(
            json.dumps({"day": now, "device": device.name, **versions, "quick": options.quick})
            + "\n"
        )
    ends = []
    with tempfile.TemporaryDirectory(prefix="gpu-day-") as home:
        for name in options.part or PARTS:
            print(f"{name} ...", flush=True)
            part = Part(name, device, options.root, options.quick, Path(home), options.json)
            ends.append(end_of(part))
            print("  ".join(ends[-1]), flush=True)
    print("\n" + "\n".join(table(ends)) + f"\n\nrows: {options.json}")
    return int(any(end[1] != "ok" for end in ends))


def this_device() -> Device:
    if not torch.cuda.is_available():
        return Device(device_name(torch.device("cpu")), "")
    uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
    return Device(torch.cuda.get_device_name(), uuid, torch.cuda.device_count())


def end_of(part: Part) -> tuple[str, str, str, str]:
    """Runs the part: its name, "ok" or "FAILED", its seconds, and what it found; also as its last
    row."""
    began_s = time.monotonic()
    result = "ok"
    try:
        found = PARTS[part.name](part)
    except Failed as error:
        result = "FAILED"
        found = str(error)
    except Exception:  # whatever it is, the other parts run
        result = "FAILED"
        found = traceback.format_exc()
    shutil.rmtree(part.folder)
    seconds = time.monotonic() - began_s
    part.row(ended=result, seconds=round(seconds, 1), found=found)
    return part.name, result, f"{seconds:.0f} s", found


def table(ends: list[tuple[str, str, str, str]]) -> list[str]:
    """A line for each part; of an error the first and the last line."""
    lines = [f"{'part':12} {'result':7} {'time':>6}  found"]
    for name, result, seconds, found in ends:
        first, *others = found.strip().splitlines()
        lines.append(
            f"{name:12} {result:7} {seconds:>6}  {first}" + (f" ... {others[-1]}" if others else "")
        )
    return lines


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--part",
        nargs="+",
        choices=PARTS,
        metavar="NAME",
        help=f"{', '.join(PARTS)}; default: all, in this order",
    )
    parser.add_argument("--root", type=Path, help="folder of data sets")
    parser.add_argument("--json", type=Path, default=Path("gpu-day.jsonl"))
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    options.root = options.root and options.root.resolve()
    return options


if __name__ == "__main__":
    sys.exit(main())
