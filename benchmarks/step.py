"""Training images/s of one process: the textbook loop, a loop by hand with the same switches as hvdtrain's, and hvdtrain, by turns.

python benchmarks/step.py --root DIR [--widths 16,16,32,64] [--batch 128] [--rounds 9] [--steps 10] [--switches] [--json FILE] [WORD ...]

Textbook: DataLoader over torchvision's FashionMNIST with ToTensor, fp32, contiguous, torch.optim.SGD, .item() of loss and hits at each
step. By hand: the set on the device as uint8, batches by index, channels_last, autocast, foreach SGD, sums read at the end of a block, and
hvdtrain's own network. WORDS go to hvdtrain, which has speed.precision=auto. --switches adds a row for each switch alone. Before anything
is timed, hvdtrain and the loop by hand must give the same loss from the same weights; after it, both loops must have learned.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from blocks import Trainer, spread
from torch import nn
from torch.nn import functional

from hvdtrain.comm.communicator import SingleProcessCommunicator
from hvdtrain.core.import_torchvision import import_torchvision
from hvdtrain.frameworks.torch import allocator
from hvdtrain.frameworks.torch.models.wide_resnet import WideResNet, build
from hvdtrain.frameworks.torch.precision import is_built_for_bf16
from hvdtrain.train.health.signals import Signals

MEAN, STD = 0.2860, 0.3530  # of Fashion-MNIST's training images
LR = 0.02


def model(widths: tuple[int, ...], plain: bool, device: torch.device, dropout: float = 0.01) -> WideResNet:
    """The network of the course; `plain` with torch's own dropout."""
    torch.manual_seed(1)
    made = build("wide_resnet", (28, 28, 1), 10, widths=widths, dropout=dropout)  # type: ignore[arg-type]
    for block in made.modules() if plain else ():
        if hasattr(block, "dropout"):
            block.dropout = nn.Dropout(dropout)
    return made.to(device)  # type: ignore[return-value]


class Textbook:
    """What a beginner's script does."""

    def __init__(self, root: Path, widths: tuple[int, ...], batch: int, device: torch.device, workers: int) -> None:
        vision = import_torchvision()
        from torchvision import transforms

        change = transforms.Compose([transforms.ToTensor(), transforms.Normalize((MEAN,), (STD,))])
        data = vision.datasets.FashionMNIST(str(root), train=True, transform=change)
        options: dict[str, Any] = {"persistent_workers": True} if workers else {}
        self.loader = torch.utils.data.DataLoader(data, batch, shuffle=True, num_workers=workers, **options)
        self.device, self.model = device, model(widths, True, device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=LR, momentum=0.9)
        self.batches = self._endless()
        self.loss = self.right = 0.0

    def _endless(self) -> Iterator[Any]:
        while True:
            yield from self.loader

    def block(self, steps: int) -> float:
        """Seconds."""
        began = time.perf_counter()
        self.model.train()
        for _ in range(steps):
            x, y = next(self.batches)
            x, y = x.to(self.device), y.to(self.device)
            self.optimizer.zero_grad()
            logits = self.model(x)
            loss = functional.cross_entropy(logits, y)
            loss.backward()
            self.optimizer.step()
            self.loss += loss.item()
            self.right += (logits.argmax(1) == y).sum().item()
        return time.perf_counter() - began


class ByHand:
    """The fastest loop that a user with time would write, in `dtype`."""

    def __init__(
        self, arrays: tuple[np.ndarray, np.ndarray], widths: tuple[int, ...], batch: int, device: torch.device, half: bool
    ) -> None:
        self.x = torch.from_numpy(arrays[0].copy()).to(device)  # uint8 (n, 28, 28, 1)
        self.y = torch.from_numpy(arrays[1].copy()).to(device)
        self.batch, self.device, self.half = batch, device, half
        self.model = model(widths, False, device)
        if device.type == "cuda":
            self.model = self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=LR, momentum=0.9, foreach=True)
        self.order, self.place = torch.randperm(len(self.y)), 0
        self.mean, self.std = torch.tensor(MEAN, device=device), torch.tensor(STD, device=device)
        self.losses: list[float] = []

    def block(self, steps: int) -> float:
        """Seconds, with the wait for the device at the end."""
        began = time.perf_counter()
        self.model.train()
        loss_sum, right = torch.zeros((), device=self.device), torch.zeros((), device=self.device)
        for _ in range(steps):
            if self.place + self.batch > len(self.order):
                self.order, self.place = torch.randperm(len(self.y)), 0
            rows = self.order[self.place : self.place + self.batch].to(self.device)
            self.place += self.batch
            x, y = self.x[rows].permute(0, 3, 1, 2), self.y[rows]
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


def check(trainer: Trainer, hand: ByHand) -> None:
    """hvdtrain's learner and the loop by hand, from the same weights on the same samples, give the same loss, and move alike."""
    learner: Any = trainer.job.learner
    hand.model.load_state_dict(learner.model.state_dict())
    rows = np.arange(64)
    for one in (learner.model, hand.model):
        one.eval()
    there = learner.to_device(trainer.datasets.train.read(rows))
    ours = float(learner.evaluate(there)["loss"]) / 64
    x = (hand.x[:64].permute(0, 3, 1, 2).float() / 255.0 - hand.mean) / hand.std
    with torch.no_grad(), torch.autocast(hand.device.type, torch.bfloat16, enabled=hand.half):
        theirs = float(functional.cross_entropy(hand.model(x).float(), hand.y[:64]))
    assert abs(ours - theirs) < 0.02 * abs(theirs), (ours, theirs)


def compare(ones: dict[str, Callable[[int], float]], batch: int, rounds: int, steps: int) -> dict[str, Any]:
    """images/s of each, and the ratios to the first and to the second within a round; the order turns."""
    times: dict[str, list[float]] = {name: [] for name in ones}
    names = list(ones)
    for turn in range(rounds + 1):  # the first round warms up
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            allocator.keep(name not in ("textbook", "by hand"))  # it is the whole process's
            times[name].append(ones[name](steps))
    rows: dict[str, Any] = {}
    for name in names:
        seconds = times[name][1:]
        rows[name] = {"images_per_s": round(batch * steps / statistics.median(seconds), 1)}
        for other in names:
            if other != name and other in ("textbook", "by hand"):
                middle, quartiles = spread([b / a for a, b in zip(seconds, times[other][1:], strict=True)], 3)
                rows[name][f"to {other}"] = [middle, *quartiles]
    return rows


SWITCHES = {  # each row is hvdtrain with these words instead of speed.precision=auto
    "fp32, contiguous": ["speed.channels_last=false"],
    "fp32": [],
    "bf16, contiguous": ["speed.precision=bf16", "speed.channels_last=false"],
    "bf16": ["speed.precision=bf16"],
    "bf16, read ahead": ["speed.precision=bf16", "data.ahead=2"],
    "bf16, resident": ["speed.precision=bf16", "data.resident=true"],
    "bf16, compiled": ["speed.precision=bf16", "speed.compile=default"],
    "bf16, torch's SGD": ["speed.precision=bf16", "optim.name=torch.optim.SGD", "optim.momentum=0.9"],
}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--widths", default="16,16,32,64")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--workers", type=int, default=0, help="of the textbook's DataLoader")
    parser.add_argument("--switches", action="store_true", help="a row for each switch alone")
    parser.add_argument("--json", type=Path)
    parser.add_argument("words", nargs="*", help="for hvdtrain: speed.compile=default")
    return parser.parse_args()


def main() -> None:
    a = parse()
    widths = tuple(int(w) for w in a.widths.split(","))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    half = is_built_for_bf16(device)
    data = ["data.name=fashion_mnist", f"data.root={a.root}", f"model.widths=[{a.widths}]", f"batch.size={a.batch}", f"optim.base_lr={LR}"]
    data += [f"log.every_steps={a.steps}"]
    with Signals(0) as signals:
        trainer = Trainer([*data, "speed.precision=auto", *a.words], SingleProcessCommunicator(), signals)
        source: Any = trainer.datasets.train
        hand = ByHand((source.x, source.y), widths, a.batch, device, half)
        check(trainer, hand)
        textbook = Textbook(a.root, widths, a.batch, device, a.workers)
        ones: dict[str, Callable[[int], float]] = {"textbook": textbook.block, "by hand": hand.block, "hvdtrain": trainer.block}
        for name, words in SWITCHES.items() if a.switches else ():
            ones[name] = Trainer([*data, *words], SingleProcessCommunicator(), signals).block
        rows = compare(ones, a.batch, a.rounds, a.steps)
    seen = a.steps * (a.rounds + 1)
    most = 2.2 if seen >= 50 else 5.0  # log(10) is 2.30; a few steps may go up
    assert textbook.loss / seen < most and hand.losses[-1] < most, f"a loop that is timed must learn: {textbook.loss / seen}, {hand.losses}"
    facts: dict[str, Any] = {"device": device_words(device), "torch": torch.__version__, "bf16": half, "widths": widths, "batch": a.batch}
    facts |= {"words": a.words, "textbook_workers": a.workers, "rounds": a.rounds, "steps_per_round": a.steps}
    print("\n".join(table(rows)))
    if a.json:
        with a.json.open("a") as out:
            out.write(json.dumps(facts | {"rows": rows}) + "\n")


def device_words(device: torch.device) -> str:
    """What computes, and with how many threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpu = next((line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line), "")
    return f"{cpu or platform.machine()}, {torch.get_num_threads()} threads"


def table(rows: dict[str, Any]) -> list[str]:
    """images/s, and the ratios with their quartiles."""
    lines = [f"{'':20} {'images/s':>10}  {'x textbook (quartiles)':>26}  {'x by hand (quartiles)':>26}"]
    for name, row in rows.items():
        ratios = [row.get(f"to {other}", [1.0, 1.0, 1.0]) for other in ("textbook", "by hand")]
        words = [f"{middle:.3f} ({low:.3f} to {high:.3f})" for middle, low, high in ratios]
        lines.append(f"{name:20} {row['images_per_s']:10.1f}  {words[0]:>26}  {words[1]:>26}")
    return lines


if __name__ == "__main__":
    main()
