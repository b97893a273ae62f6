"""Training images/s of one process: the textbook loop, a loop by hand with the same switches as hvdtrain's, and hvdtrain, in turn.

python benchmarks/step.py --root DIR [--widths 16,16,32,64] [--batch 128] [--rounds 9] [--steps 10] [--switches]
                          [--json FILE] [key=value ...]

Textbook: DataLoader over torchvision's FashionMNIST with ToTensor, fp32, contiguous, torch.optim.SGD, .item() of loss and hits in each
step. By hand: the data on the device as uint8, batches by index, channels_last, autocast, foreach SGD, sums read at the end of a block,
and hvdtrain's network. hvdtrain runs with speed.precision=auto and the key=value overrides. --switches adds a row for each switch alone.
Before the timing, hvdtrain and the loop by hand must give the same loss from the same weights; after it, both loops must have learned.
"""  # noqa: E501

from __future__ import annotations

import argparse
import functools
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from blocks import Trainer, in_turn, spread
from torch import nn
from torch.nn import functional

from hvdtrain.comm.communicator import SingleProcessCommunicator
from hvdtrain.core.import_torchvision import import_torchvision
from hvdtrain.frameworks.torch.device import keep_freed_memory
from hvdtrain.frameworks.torch.models.wide_resnet import WideResNet, build
from hvdtrain.frameworks.torch.precision import is_built_for_bf16
from hvdtrain.training.health.signals import Signals

# of Fashion-MNIST's training images
MEAN = 0.2860
STD = 0.3530
LR = 0.02
REFERENCES = ("textbook", "by hand")


def model(
    widths: tuple[int, ...], plain: bool, device: torch.device, dropout: float = 0.01
) -> WideResNet:
    """The network of hvdtrain; `plain` with torch's own dropout."""
    torch.manual_seed(1)
    made = build("wide_resnet", (28, 28, 1), 10, widths=widths, dropout=dropout)  # type: ignore[arg-type]
    for block in made.modules() if plain else ():
        if hasattr(block, "dropout"):
            block.dropout = nn.Dropout(dropout)
    return made.to(device)  # type: ignore[return-value]


class Textbook:
    """The loop of a beginner's script."""

    def __init__(
        self, root: Path, widths: tuple[int, ...], batch: int, device: torch.device, workers: int
    ) -> None:
        vision = import_torchvision()
        from torchvision import transforms

        change = transforms.Compose([transforms.ToTensor(), transforms.Normalize((MEAN,), (STD,))])
        data = vision.datasets.FashionMNIST(str(root), train=True, transform=change)
        options: dict[str, Any] = {"persistent_workers": True} if workers else {}
        self.loader = torch.utils.data.DataLoader(
            data, batch, shuffle=True, num_workers=workers, **options
        )
        self.device = device
        self.model = model(widths, True, device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=LR, momentum=0.9)
        self.batches = self._endless()
        self.loss = 0.0  # sum over all steps so far
        self.right = 0.0

    def _endless(self) -> Iterator[Any]:
        while True:
            yield from self.loader

    def block(self, steps: int) -> float:
        """Trains that many steps; returns the seconds."""
        began = time.perf_counter()
        self.model.train()
        for _ in range(steps):
            x, y = next(self.batches)
            x = x.to(self.device)
            y = y.to(self.device)
            self.optimizer.zero_grad()
            logits = self.model(x)
            loss = functional.cross_entropy(logits, y)
            loss.backward()
            self.optimizer.step()
            self.loss += loss.item()
            self.right += (logits.argmax(1) == y).sum().item()
        return time.perf_counter() - began


class ByHand:
    """The fastest loop that an expert would write; `half`: in bfloat16."""

    def __init__(
        self,
        arrays: tuple[np.ndarray, np.ndarray],
        widths: tuple[int, ...],
        batch: int,
        device: torch.device,
        half: bool,
    ) -> None:
        self.x = torch.from_numpy(arrays[0].copy()).to(device)  # uint8 (n, 28, 28, 1)
        self.y = torch.from_numpy(arrays[1].copy()).to(device)
        self.batch = batch
        self.device = device
        self.half = half
        self.model = model(widths, False, device)
        if device.type == "cuda":
            self.model = self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=LR, momentum=0.9, foreach=True)
        self.order = torch.randperm(len(self.y))
        self.position = 0  # in the order
        self.mean = torch.tensor(MEAN, device=device)
        self.std = torch.tensor(STD, device=device)
        self.losses: list[float] = []

    def block(self, steps: int) -> float:
        """Trains that many steps; returns the seconds, with the wait for the device at the end."""
        began = time.perf_counter()
        self.model.train()
        loss_sum = torch.zeros((), device=self.device)
        right = torch.zeros((), device=self.device)
        for _ in range(steps):
            if self.position + self.batch > len(self.order):
                self.order = torch.randperm(len(self.y))
                self.position = 0
            rows = self.order[self.position : self.position + self.batch].to(self.device)
            self.position += self.batch
            x = self.x[rows].permute(0, 3, 1, 2)
            y = self.y[rows]
            x = (x.float() / 255.0 - self.mean) / self.std
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.half):
                logits = self.model(x)
            loss = functional.cross_entropy(logits.float(), y)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            loss_sum += loss.detach()
            right += (logits.detach().argmax(1) == y).sum()
        self.losses.append(float(loss_sum) / steps)
        return time.perf_counter() - began


def check_same_loss(trainer: Trainer, hand: ByHand) -> None:
    """hvdtrain's learner and the loop by hand give the same loss from the same weights on the same
    samples."""
    learner: Any = trainer.job.learner
    hand.model.load_state_dict(learner.model.state_dict())
    rows = np.arange(64)
    learner.model.eval()
    hand.model.eval()
    batch = learner.to_device(trainer.datasets.train.read(rows))
    ours = float(learner.evaluate(batch)["loss"]) / 64
    x = (hand.x[:64].permute(0, 3, 1, 2).float() / 255.0 - hand.mean) / hand.std
    with torch.no_grad(), torch.autocast(hand.device.type, torch.bfloat16, enabled=hand.half):
        theirs = float(functional.cross_entropy(hand.model(x).float(), hand.y[:64]))
    assert abs(ours - theirs) < 0.02 * abs(theirs), (ours, theirs)


def compare(
    blocks: dict[str, Callable[[int], float]], batch: int, rounds: int, steps: int
) -> dict[str, Any]:
    """images/s of each loop, and the ratios to "textbook" and "by hand" within a round; each round
    starts with another loop."""

    def block(name: str, steps: int) -> float:
        keep_freed_memory(name not in REFERENCES)  # a setting of the whole process
        return blocks[name](steps)

    times = in_turn({name: functools.partial(block, name) for name in blocks}, rounds, steps)
    rows: dict[str, Any] = {}
    for name, seconds in times.items():
        rows[name] = {"images_per_s": round(batch * steps / statistics.median(seconds), 1)}
        for other in times:
            if other != name and other in REFERENCES:
                median, quartiles = spread(
                    [b / a for a, b in zip(seconds, times[other], strict=True)], 3
                )
                rows[name][f"to {other}"] = [median, *quartiles]
    return rows


SWITCHES = {  # each row is hvdtrain with these overrides instead of speed.precision=auto
    "fp32, contiguous": ["speed.channels_last=false"],
    "fp32": [],
    "bf16, contiguous": ["speed.precision=bf16", "speed.channels_last=false"],
    "bf16": ["speed.precision=bf16"],
    "bf16, read ahead": ["speed.precision=bf16", "data.ahead=2"],
    "bf16, resident": ["speed.precision=bf16", "data.resident=true"],
    "bf16, compiled": ["speed.precision=bf16", "speed.compile=default"],
    "bf16, torch's SGD": [
        "speed.precision=bf16",
        "optim.name=torch.optim.SGD",
        "optim.momentum=0.9",
    ],
}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--widths", default="16,16,32,64")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument(
        "--workers", type=int, default=0, help="workers of the textbook's DataLoader"
    )
    parser.add_argument("--switches", action="store_true", help="add a row for each switch alone")
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="for hvdtrain, as in speed.compile=default",
    )
    return parser.parse_args()


def main() -> None:
    options = parse()
    widths = tuple(int(width) for width in options.widths.split(","))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    half = is_built_for_bf16(device)
    job = [
        "data.name=fashion_mnist",
        f"data.root={options.root}",
        f"model.widths=[{options.widths}]",
        f"batch.size={options.batch}",
        f"optim.base_lr={LR}",
        f"log.every_steps={options.steps}",
    ]
    with Signals(0) as signals:
        trainer = Trainer(
            [*job, "speed.precision=auto", *options.overrides], SingleProcessCommunicator(), signals
        )
        source: Any = trainer.datasets.train
        hand = ByHand((source.x, source.y), widths, options.batch, device, half)
        check_same_loss(trainer, hand)
        textbook = Textbook(options.root, widths, options.batch, device, options.workers)
        blocks: dict[str, Callable[[int], float]] = {
            "textbook": textbook.block,
            "by hand": hand.block,
            "hvdtrain": trainer.block,
        }
        if options.switches:
            for name, overrides in SWITCHES.items():
                blocks[name] = Trainer(
                    [*job, *overrides], SingleProcessCommunicator(), signals
                ).block
        rows = compare(blocks, options.batch, options.rounds, options.steps)
    steps = options.steps * (options.rounds + 1)
    largest = 2.2 if steps >= 50 else 5.0  # log(10) is 2.30; a few steps may go up
    textbook_loss = textbook.loss / steps
    assert textbook_loss < largest and hand.losses[-1] < largest, (
        f"a timed loop must learn: {textbook_loss}, {hand.losses}"
    )
    facts: dict[str, Any] = {
        "device": device_name(device),
        "torch": torch.__version__,
        "bf16": half,
        "widths": widths,
        "batch": options.batch,
        "words": options.overrides,
        "textbook_workers": options.workers,
        "rounds": options.rounds,
        "steps_per_round": options.steps,
    }
    print("\n".join(table(rows)))
    if options.json:
        with options.json.open("a") as out:
            out.write(json.dumps(facts | {"rows": rows}) + "\n")


def device_name(device: torch.device) -> str:
    """The GPU, or the CPU and the number of threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpu = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        "",
    )
    return f"{cpu or platform.machine()}, {torch.get_num_threads()} threads"


def table(rows: dict[str, Any]) -> list[str]:
    """A line for each loop: images/s, and the ratios with their quartiles."""
    lines = [
        f"{'':20} {'images/s':>10}  {'x textbook (quartiles)':>26}  {'x by hand (quartiles)':>26}"
    ]
    for name, row in rows.items():
        ratios = [row.get(f"to {other}", [1.0, 1.0, 1.0]) for other in REFERENCES]
        cells = [f"{median:.3f} ({low:.3f} to {high:.3f})" for median, low, high in ratios]
        lines.append(f"{name:20} {row['images_per_s']:10.1f}  {cells[0]:>26}  {cells[1]:>26}")
    return lines


if __name__ == "__main__":
    main()
