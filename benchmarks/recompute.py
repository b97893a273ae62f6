"""Memory and time of a training step with and without model.recompute: an image GPT of 12 layers on 1,024 tokens, on a CPU.

python benchmarks/recompute.py [--layers 12] [--heads 8] [--width 256] [--context 1024] [--vocabulary 513] [--batch 4] [--rounds 5]
                               [--which none,2,all] [--json FILE]

Three numbers tell what a step needs, each of a process of its own, in MB (10^6 bytes):
- kept: what the forward pass keeps for the backward pass, in each block and beside the blocks, by torch's saved_tensors_hooks; the weights
  are not counted. This is what model.recompute is about.
- tensors: the largest sum of all tensors that exist at once in a step, by torch's MemTracker: weights, gradients, optimizer state,
  activations, and what operations make in between.
- process: the largest resident memory of three steps above that of a process that has made a tiny step, with glibc's malloc as it is;
  process_keeps: as hvdtrain sets it.
Seconds of a step are of the processor, of both in turn. Before that, their gradients in float64 must be the same to the last bit.
"""  # noqa: E501

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from blocks import spread
from step import device_name
from torch.nn import functional

from hvdtrain.frameworks.torch.device import keep_freed_memory
from hvdtrain.frameworks.torch.models import gpt
from hvdtrain.frameworks.torch.recompute import recompute_blocks

SIZES = {"layers": 12, "heads": 8, "width": 256, "context": 1024, "vocabulary": 513, "batch": 4}
MB = 1e6


class Step:
    """A model, its optimizer, and a batch of random tokens."""

    def __init__(self, sizes: dict[str, int], which: str) -> None:
        torch.manual_seed(1)
        self.model: Any = gpt.build(
            "gpt",
            sizes["context"],
            sizes["vocabulary"],
            layers=sizes["layers"],
            heads=sizes["heads"],
            width=sizes["width"],
        )
        recompute_blocks(self.model, int(which) if which.isdecimal() else which, "--which")  # type: ignore[arg-type]
        self.tokens = torch.randint(sizes["vocabulary"], (sizes["batch"], sizes["context"] + 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def loss(self) -> torch.Tensor:
        return functional.cross_entropy(
            self.model(self.tokens[:, :-1]).flatten(0, 1), self.tokens[:, 1:].flatten()
        )

    def __call__(self) -> None:
        self.loss().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def kept(step: Step) -> dict[str, Any]:
    """MB that the forward pass keeps: in each block, and outside of the blocks. A tensor that
    several operations keep counts once."""
    weights = {p.untyped_storage().data_ptr() for p in step.model.parameters()}
    seen: set[int] = set()
    found = [0] * (len(step.model.blocks) + 1)  # the last one: outside
    here = [-1]
    held: list[torch.Tensor] = []  # until the end, so that no address is used twice

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights | seen:
            seen.add(storage.data_ptr())
            held.append(tensor)
            found[here[0]] += storage.nbytes()
        return tensor

    def enter(number: int) -> Any:
        return lambda *_: here.__setitem__(0, number)

    for number, block in enumerate(step.model.blocks):
        block.register_forward_pre_hook(enter(number))
        block.register_forward_hook(enter(-1))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        step.loss()
    blocks = [round(size / MB, 4) for size in found[:-1]]
    return {"blocks": blocks, "beside": round(found[-1] / MB, 4), "all": round(sum(found) / MB, 4)}


def tensors(step: Step) -> dict[str, float]:
    """MB at the moment at which there are most, after a first step, which makes the optimizer's
    state."""
    from torch.distributed._tools.mem_tracker import MemTracker

    step()
    tracker = MemTracker()
    tracker.track_external(step.model, step.optimizer)
    with tracker:
        step()
    peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
    return {
        str(kind).rpartition(".")[2].lower(): round(size / MB, 1)
        for kind, size in peak.items()
        if size
    }


def process(sizes: dict[str, int], which: str, keeps: bool) -> float:
    """Returns by how many MB resident memory rises during three steps."""
    if keeps:
        keep_freed_memory()
    Step(sizes | {"layers": 1, "context": 8, "batch": 1}, which)()  # loads libraries: 100 MB
    before = status("VmRSS")
    step = Step(sizes, which)
    for _ in range(3):
        step()
    return round(status("VmHWM") - before, 1)


def status(name: str) -> float:
    """MB of this process."""
    line = next(
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name)
    )
    return int(line.split()[1]) * 1024 / MB


def in_child(sizes: dict[str, int], measure: str, which: str) -> Any:
    arguments = [f"--{name}={value}" for name, value in sizes.items()]
    command = [sys.executable, __file__, *arguments, "--which", which, "--measure", measure]
    return json.loads(
        subprocess.run(
            command, capture_output=True, text=True, check=True, env={**os.environ}
        ).stdout
    )


def measured(sizes: dict[str, int], measure: str, which: str) -> Any:
    """In the child."""
    if measure in ("process", "process_keeps"):
        return process(sizes, which, measure == "process_keeps")
    step = Step(sizes, which)
    return kept(step) if measure == "kept" else tensors(step)


def check_same_gradients(sizes: dict[str, int], which: list[str]) -> None:
    """In float64, of one sequence."""
    found: list[list[torch.Tensor]] = []
    for each in which:
        step = Step(sizes | {"batch": 1}, each)
        step.model.double()
        step.loss().backward()
        found.append([p.grad for p in step.model.parameters()])
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def seconds(sizes: dict[str, int], which: list[str], rounds: int) -> dict[str, Any]:
    """Returns CPU seconds: the median and quartiles of each, and of the ratios to the first one in
    the same round."""
    steps = {each: Step(sizes, each) for each in which}
    times: dict[str, list[float]] = {each: [] for each in which}
    for number in range(rounds + 1):  # the first round warms up
        for each in which[:: 1 if number % 2 else -1]:
            began_s = time.process_time()
            steps[each]()
            times[each].append(time.process_time() - began_s)
    first = times[which[0]][1:]
    return {
        each: {
            "s_per_step": round(statistics.median(found[1:]), 3),
            "quartiles_s": spread(found[1:], 3)[1],
            f"to {which[0]}": spread([a / b for a, b in zip(found[1:], first, strict=True)], 3),
        }
        for each, found in times.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name, value in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--which", default="none,2,all")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    options = parser.parse_args()
    sizes = {name: getattr(options, name) for name in SIZES}
    if options.measure:
        print(json.dumps(measured(sizes, options.measure, options.which)))
        return
    which = options.which.split(",")
    check_same_gradients(sizes, which)
    measures = ("kept", "tensors", "process", "process_keeps")
    found: dict[str, Any] = {
        each: {measure: in_child(sizes, measure, each) for measure in measures} for each in which
    }
    for each, times in seconds(sizes, which, options.rounds).items() if options.rounds else ():
        found[each] |= times
    load = round(os.getloadavg()[0], 1)
    facts = {
        "device": device_name(torch.device("cpu")),
        "load": load,
        "torch": torch.__version__,
        "sizes": sizes,
        "rounds": options.rounds,
    }
    print(json.dumps(facts | found, indent=2))
    if options.json:
        with options.json.open("a") as out:
            out.write(json.dumps(facts | found) + "\n")


if __name__ == "__main__":
    main()
