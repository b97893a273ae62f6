"""The search for a recipe of batch 4096 on Fashion-MNIST that trains as well as SGD at batch 128: a loop of plain torch, one process.

python benchmarks/search_large_batch.py --root DIR [--seeds 0,1] [--held-out 10000] "opt=muon lr=0.15 momentum=0.9 ema=0.9 end=0.3" ...

DIR holds FashionMNIST/raw. Each argument is a trial: values that differ from TRIAL, by default Muon at batch 4096. Accuracies are those of training
images that are held out, other ones for each seed; --held-out 0: of the test set. Each trial appends a row to search_large_batch.jsonl. The trials of
2026-11-30 are its first rows, and tables in recipes.md; they ran in a draft of this file, which gives the same accuracies but for mixup. A
trial takes 45 s for each seed on one core (SAM twice that).
"""  # noqa: E501

from __future__ import annotations

import argparse
import copy
import math
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rows import FOLDER, append
from torch import nn
from torch.nn.functional import cross_entropy

ROWS = FOLDER / "search_large_batch.jsonl"
EPOCHS = 12
TRIAL: dict[str, Any] = {
    "opt": "muon",  # sgd, muon, soap
    "lr": 0.15,
    "momentum": 0.7,  # Nesterov's
    "rest_rate": 0.32,  # of what Muon and SOAP leave to AdamW: this times lr
    "decay": 1e-4,
    "last_layer": 0,  # 1: Muon and SOAP train the last layer, too
    "unit_rows": 0,  # 1: each matrix keeps the norm of one with rows of length 1
    "batch": 4096,
    "ghost": 512,  # images in a pass, over which batch norm computes its statistics
    "warmup": 0.0,  # epochs
    "schedule": "linear",  # cosine, constant
    "end": 0.0,  # the last rate of linear, as a part of lr
    "smoothing": 0.0,
    "mixup": 0.0,
    "sam": 0.0,  # the radius of sharpness-aware minimization, of each pass
    "ema": 0.0,  # of the weights, per step
    "ema_statistics": 1,  # 0: batch norm's running statistics are not averaged
}
BETAS = 0.9, 0.95
EPS = 1e-8

Images = tuple[torch.Tensor, torch.Tensor]  # (n, 28, 28) float in 0 to 1, (n,) int64


def read_idx(path: Path) -> np.ndarray:
    data = path.read_bytes()
    shape = np.frombuffer(data, ">u4", data[3], 4)
    return np.frombuffer(data, np.uint8, offset=4 + 4 * data[3]).reshape(shape)


def read(root: Path, part: str) -> Images:
    raw = root / "FashionMNIST" / "raw"
    images = read_idx(raw / f"{part}-images-idx3-ubyte")
    labels = read_idx(raw / f"{part}-labels-idx1-ubyte")
    return torch.from_numpy(images.copy()).float() / 255, torch.from_numpy(labels.copy()).long()


def network() -> nn.Sequential:
    """The convnet of configs/fashion_mnist_4096.yaml."""
    layers: list[nn.Module] = []
    before = 1
    for width in (16, 32, 64):
        conv = nn.Conv2d(before, width, 3, 2, 1, bias=False)
        layers += [conv, nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
        before = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, 10))


def orthogonal(gradient: torch.Tensor) -> torch.Tensor:
    """Five steps of the Newton-Schulz iteration (Jordan 2024, Muon), of (n, ...) as a matrix."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = gradient.reshape(len(gradient), -1)
    is_tall = x.shape[0] > x.shape[1]
    x = x.T if is_tall else x
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return (x.T if is_tall else x).reshape(gradient.shape)


class Optimizer:
    """Updates matrices by the trial's optimizer, and the other parameters by AdamW, but for SGD."""

    def __init__(self, model: nn.Module, trial: dict[str, Any]) -> None:
        self._trial = trial
        self._steps = 0
        self._states: dict[nn.Parameter, dict[str, torch.Tensor]] = {}
        by_rule = 2 if trial["last_layer"] else 4
        of_rule = [p for p in model.parameters() if p.dim() >= by_rule]
        ids = {id(p) for p in of_rule}
        rest = [p for p in model.parameters() if id(p) not in ids]
        self._rest = [] if trial["opt"] == "sgd" else rest
        self._of_rule = of_rule + (rest if trial["opt"] == "sgd" else [])
        rules = {"sgd": self._sgd, "muon": self._muon, "soap": self._soap}
        self._update = rules[trial["opt"]]

    @torch.no_grad()
    def step(self, rate: float) -> None:
        self._steps += 1
        for p in self._of_rule:
            self._update(p, rate)
        for p in self._rest:
            self._adamw(p, rate * self._trial["rest_rate"])

    def _nesterov(self, p: nn.Parameter, gradient: torch.Tensor) -> torch.Tensor:
        momentum = self._trial["momentum"]
        mean = self._states.setdefault(p, {"mean": torch.zeros_like(p)})["mean"]
        mean.mul_(momentum).add_(gradient)
        return gradient + momentum * mean

    def _sgd(self, p: nn.Parameter, rate: float) -> None:
        p.add_(self._nesterov(p, p.grad + self._trial["decay"] * p), alpha=-rate)

    def _muon(self, p: nn.Parameter, rate: float) -> None:
        update = orthogonal(self._nesterov(p, p.grad))
        tall = math.sqrt(max(1, p.shape[0] / (p.numel() / p.shape[0])))
        if self._trial["unit_rows"]:
            p.mul_(len(p) ** 0.5 / p.norm())
        p.mul_(1 - rate * self._trial["decay"]).add_(update, alpha=-rate * tall)

    def _adamw(self, p: nn.Parameter, rate: float) -> None:
        new = {"mean": torch.zeros_like(p), "square": torch.zeros_like(p)}
        state = self._states.setdefault(p, new)
        state["mean"].mul_(BETAS[0]).add_(p.grad, alpha=1 - BETAS[0])
        self._adam_step(p, state, p.grad, state["mean"], BETAS[0], rate)

    def _adam_step(
        self,
        p: nn.Parameter,
        state: dict[str, torch.Tensor],
        gradient: torch.Tensor,
        mean: torch.Tensor,
        beta: float,
        rate: float,
    ) -> None:
        state["square"].mul_(BETAS[1]).addcmul_(gradient, gradient, value=1 - BETAS[1])
        mean = mean / (1 - beta**self._steps)
        root = (state["square"] / (1 - BETAS[1] ** self._steps)).sqrt()
        update = mean / (root + EPS)
        if "left" in state:  # back from the bases of the preconditioner
            update = (state["left_basis"] @ update @ state["right_basis"].T).reshape(p.shape)
        p.mul_(1 - rate * self._trial["decay"]).add_(update, alpha=-rate)

    def _soap(self, p: nn.Parameter, rate: float) -> None:
        """Adam in the bases of Shampoo's preconditioner (Vyas 2024, arXiv:2409.11321, alg. 3),
        which one step of QR follows."""
        g = p.grad.reshape(len(p), -1)
        beta = self._trial["momentum"]
        if p not in self._states:
            state = {"mean": torch.zeros_like(g), "square": torch.zeros_like(g)}
            state |= {"left": g @ g.T, "right": g.T @ g}
            bases = {f"{side}_basis": torch.linalg.eigh(state[side])[1] for side in _SIDES}
            self._states[p] = state | bases
        state = self._states[p]
        state["mean"].mul_(beta).add_(g, alpha=1 - beta)
        left, right = (state[f"{side}_basis"] for side in _SIDES)
        self._adam_step(p, state, left.T @ g @ right, left.T @ state["mean"] @ right, beta, rate)
        for side, square in zip(_SIDES, (g @ g.T, g.T @ g), strict=True):
            state[side].lerp_(square, 1 - BETAS[1])
            state[f"{side}_basis"] = torch.linalg.qr(state[side] @ state[f"{side}_basis"])[0]


_SIDES = "left", "right"


def rates(trial: dict[str, Any], steps: int, steps_of_epoch: float) -> Iterator[float]:
    """Yields the learning rate of each step."""
    warmup = trial["warmup"] * steps_of_epoch
    for step in range(steps):
        passed = max(0, step - warmup) / max(1, steps - warmup)
        shapes = {
            "linear": 1 - passed * (1 - trial["end"]),
            "cosine": 0.5 * (1 + math.cos(math.pi * passed)),
            "constant": 1.0,
        }
        yield (
            trial["lr"] * (min(1, (step + 1) / warmup) if warmup else 1) * shapes[trial["schedule"]]
        )


def loss_of(
    model: nn.Module, x: torch.Tensor, y: torch.Tensor, trial: dict[str, Any]
) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        outputs = model(x)
    return cross_entropy(outputs.float(), y, label_smoothing=trial["smoothing"])


def backward(
    model: nn.Module,
    x: torch.Tensor,
    y: torch.Tensor,
    trial: dict[str, Any],
    step: int,
    weight: float,
) -> None:
    """Adds the gradient of a pass, times its weight in the step."""
    if trial["mixup"]:
        share = np.random.default_rng(step).beta(trial["mixup"], trial["mixup"])
        other = torch.randperm(len(x), generator=_MIXED)
        x = share * x + (1 - share) * x[other]
        losses = [loss_of(model, x, labels, trial) for labels in (y, y[other])]
        (weight * (share * losses[0] + (1 - share) * losses[1])).backward()
        return
    loss = loss_of(model, x, y, trial)
    if not trial["sam"]:
        (weight * loss).backward()
        return
    parameters = list(model.parameters())
    gradient = torch.autograd.grad(loss, parameters)
    radius = trial["sam"] / math.sqrt(sum(float((g * g).sum()) for g in gradient))
    move(parameters, gradient, radius)
    (weight * loss_of(model, x, y, trial)).backward()
    move(parameters, gradient, -radius)


@torch.no_grad()
def move(
    parameters: Sequence[nn.Parameter], gradient: Sequence[torch.Tensor], radius: float
) -> None:
    for p, g in zip(parameters, gradient, strict=True):
        p.add_(g, alpha=radius)


_MIXED = torch.Generator()


def accuracy(model: nn.Module, images: Images) -> float:
    """In percent."""
    model.eval()
    with torch.no_grad():
        right = sum(
            int((model(x).argmax(1) == y).sum())
            for x, y in zip(*(part.split(2000) for part in images), strict=True)
        )
    return round(100 * right / len(images[1]), 3)


def normalized(images: Images, mean: torch.Tensor, std: torch.Tensor) -> Images:
    x = ((images[0] - mean) / std)[:, None]
    return x.contiguous(memory_format=torch.channels_last), images[1]


def result(trial: dict[str, Any], train: Images, test: Images, seed: int) -> dict[str, Any]:
    """Trains once; returns the accuracy, which is that of the averaged weights with ema."""
    mean, std = train[0].mean(), train[0].std()
    (x, y), test = normalized(train, mean, std), normalized(test, mean, std)
    torch.manual_seed(seed)
    model = network()
    optimizer = Optimizer(model, trial)
    order_from = torch.Generator().manual_seed(1000 + seed)
    _MIXED.manual_seed(2000 + seed)
    order = torch.cat([torch.randperm(len(x), generator=order_from) for _ in range(EPOCHS + 1)])
    steps = int(EPOCHS * len(x) / trial["batch"])
    averaged: dict[str, torch.Tensor] = {}
    began = time.process_time()
    for step, rate in enumerate(rates(trial, steps, len(x) / trial["batch"])):
        model.train()
        model.zero_grad()
        samples = order[step * trial["batch"] : (step + 1) * trial["batch"]]
        parts = samples.chunk(max(1, trial["batch"] // trial["ghost"]))
        for part in parts:
            backward(model, x[part], y[part], trial, step, 1 / len(parts))
        optimizer.step(rate)
        if trial["ema"]:
            for name, tensor in model.state_dict().items():
                now = tensor.detach().clone().float()
                averaged[name] = (
                    averaged[name].lerp_(now, 1 - trial["ema"]) if name in averaged else now
                )
    found = {"accuracy": accuracy(model, test), "steps": steps}
    if averaged:
        own = model.state_dict()
        keeps = () if trial["ema_statistics"] else ("running_mean", "running_var")
        twin = copy.deepcopy(model)
        twin.load_state_dict(
            {
                name: own[name] if name.endswith(keeps) else tensor.to(own[name].dtype)
                for name, tensor in averaged.items()
            }
        )
        found |= {"last_accuracy": found["accuracy"], "accuracy": accuracy(twin, test)}
    return found | {"cpu_s": round(time.process_time() - began, 1)}


def held_out(images: Images, count: int, seed: int) -> tuple[Images, Images]:
    """Returns the rest, and `count` of them that depend on the seed."""
    generator = torch.Generator().manual_seed(12345 + seed)
    order = torch.randperm(len(images[1]), generator=generator)
    rest, held = ((images[0][part], images[1][part]) for part in (order[count:], order[:count]))
    return rest, held


def parse(words: str) -> dict[str, Any]:
    trial = dict(TRIAL)
    for word in words.split():
        key, equals, value = word.partition("=")
        if key not in TRIAL or not equals:
            sys.exit(f"{word}: not KEY=VALUE; the keys are {', '.join(TRIAL)}")
        trial[key] = type(TRIAL[key])(value)
    return trial


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--seeds", default="0,1")
    parser.add_argument("--held-out", type=int, default=10_000)
    parser.add_argument("--out", type=Path, default=ROWS)
    parser.add_argument("trials", nargs="+")
    args = parser.parse_args(arguments)
    trials = [parse(words) for words in args.trials]
    torch.set_num_threads(1)
    train = read(args.root, "train")
    test = read(args.root, "t10k")
    for words, trial in zip(args.trials, trials, strict=True):
        results = []
        for seed in map(int, args.seeds.split(",")):
            parts = held_out(train, args.held_out, seed) if args.held_out else (train, test)
            results.append({"seed": seed} | result(trial, *parts, seed))
            print(words, results[-1], flush=True)
        append(args.out, {"trial": words, "held_out": args.held_out, "results": results})


if __name__ == "__main__":
    main()
