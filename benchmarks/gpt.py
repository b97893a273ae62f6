"""Training tokens/s of an image GPT in one process, and its sampling speed.

A hand-written loop like nanoGPT's, and hvdtrain, take turns.

python benchmarks/gpt.py [--rounds 20] [--steps 5] [--draws 7] [--images 32] [--accelerate] [--json FILE] [key=value ...]

By hand: all tokens on the device, batches by index, autocast, torch.optim.AdamW (foreach) with decay on matrices alone, clip_grad_norm_,
the loss read at the end of a block; the model is hvdtrain's, from the same weights. Before the timing both must give the same loss, after
it both must have learned. Drawing: 32 images with the cache; and without it, the logits of one
position of all images, computed from the first position.

On a CPU, seconds are this process's CPU time over all its threads: other processes on the machine
change it little, even if they double the wall time. On a GPU they are wall time. Blocks of both
alternate, and each ratio is of neighbours. --rounds 0 trains nothing, --draws 0 draws nothing.
"""  # noqa: E501

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from blocks import Trainer, spread
from rows import append
from step import device_name
from torch.nn import functional

from hvdtrain.comm.communicator import SingleProcessCommunicator
from hvdtrain.extras.sample.of_torch import continue_sequences
from hvdtrain.frameworks.torch.models import gpt
from hvdtrain.training.health.signals import Signals

LR = 1e-3
BETAS = (0.9, 0.95)
DECAY = 0.1
CLIP = 1.0
JOB = [
    *(
        "data.name=image_tokens",
        "data.source=digits",
        "task.name=language",
        "model.name=gpt",
        "batch.size=64",
        "optim.name=adamw",
    ),
    *(
        f"optim.base_lr={LR}",
        "optim.beta2=0.95",
        f"optim.weight_decay={DECAY}",
        f"optim.clip_norm={CLIP}",
    ),
]


class ByHand:
    """A loop as nanoGPT's train.py has it, without its evaluation."""

    def __init__(self, trainer: Trainer) -> None:
        learner: Any = trainer.job.learner
        source: Any = trainer.datasets.train
        config = trainer.job.config
        self.device = learner.device
        self.batch = config.batch.size
        self.half = learner.forward.precision.layers
        self.tokens = torch.from_numpy(source.read(np.arange(len(source)))["tokens"]).to(
            self.device
        )
        sizes = trainer.datasets.task.sizes
        options = dict(config.model.options)
        self.model = gpt.build("gpt", sizes["context"], sizes["vocabulary"], **options).to(
            self.device
        )
        self.model.load_state_dict(learner.model.state_dict())
        matrices = [p for p in self.model.parameters() if p.ndim >= 2]
        others = [p for p in self.model.parameters() if p.ndim < 2]
        groups = [
            {"params": matrices, "weight_decay": DECAY},
            {"params": others, "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS, foreach=True)
        self.loss = float("nan")  # mean of the last block

    def loss_of(self, tokens: torch.Tensor) -> torch.Tensor:
        with torch.autocast(
            self.device.type, self.half or torch.bfloat16, enabled=self.half is not None
        ):
            logits = self.model(tokens[:, :-1])
        return functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)

    def block(self, steps: int) -> None:
        """Trains that many steps, and waits for the device at the end."""
        self.model.train()
        total = torch.zeros((), device=self.device)
        for _ in range(steps):
            rows = torch.randint(len(self.tokens), (self.batch,), device=self.device)
            loss = self.loss_of(self.tokens[rows])
            self.backward(loss)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            total += loss.detach()
        self.loss = float(total) / steps


class WithAccelerate(ByHand):
    """The same loop, written as in Accelerate's documentation."""

    def __init__(self, trainer: Trainer) -> None:
        from accelerate import Accelerator

        super().__init__(trainer)
        self.accelerator = Accelerator(
            cpu=self.device.type == "cpu", mixed_precision="bf16" if self.half else "no"
        )
        prepared: Any = self.accelerator.prepare(self.model, self.optimizer)
        self.model, self.optimizer = prepared

    def loss_of(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = self.model(tokens[:, :-1])
        return functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())

    def backward(self, loss: torch.Tensor) -> None:
        self.accelerator.backward(loss)
        self.accelerator.clip_grad_norm_(self.model.parameters(), CLIP)


def check_same_loss(trainer: Trainer, hand: ByHand) -> None:
    learner = trainer.job.learner
    rows = np.arange(16)
    sums = learner.evaluate(learner.to_device(trainer.datasets.train.read(rows)))
    hand.model.eval()
    with torch.no_grad():
        theirs = float(hand.loss_of(hand.tokens[:16]))
    ours = float(sums["loss"]) / float(sums["tokens"])
    assert abs(ours - theirs) < (2e-2 if hand.half else 1e-5) * theirs, (ours, theirs)


def seconds_of(call: Callable[[], Any], device: torch.device) -> float:
    """Returns the call's CPU seconds, or with a GPU its seconds of wall time."""
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    began_s = clock()
    call()
    if device.type != "cpu":
        torch.cuda.synchronize(device)
    return clock() - began_s


def alternately(
    calls: dict[str, Callable[[], Any]], rounds: int, device: torch.device
) -> dict[str, list[float]]:
    """Seconds of each call in each round, after one that warms up; which call comes first
    alternates."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 1):
        for name in list(calls)[:: 1 if number % 2 else -1]:
            times[name].append(seconds_of(calls[name], device))
    return {name: seconds[1:] for name, seconds in times.items()}


def training(
    trainer: Trainer, hand: ByHand, others: dict[str, ByHand], rounds: int, steps: int
) -> dict[str, Any]:
    first = hand.loss_of(hand.tokens[:64]).item()
    calls: dict[str, Callable[[], Any]] = {
        "by hand": lambda: hand.block(steps),
        "hvdtrain": lambda: trainer.block(steps),
    }
    for name, other in others.items():
        calls[name] = functools.partial(other.block, steps)
    times = alternately(calls, rounds, hand.device)
    assert hand.loss < first, (hand.loss, first)
    tokens = hand.batch * (hand.tokens.shape[1] - 1) * steps
    ratio, quartiles = spread(
        [a / b for a, b in zip(times["by hand"], times["hvdtrain"], strict=True)], 3
    )
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    to_others = {
        f"hvdtrain_to_{name}": spread(
            [a / b for a, b in zip(times[name], times["hvdtrain"], strict=True)], 3
        )
        for name in others
    }
    return {
        "parameters": sum(p.numel() for p in hand.model.parameters()),
        "rounds": rounds,
        "steps_per_block": steps,
        "tokens_per_s": {name: round(tokens / seconds) for name, seconds in medians.items()},
        "hvdtrain_to_by_hand": ratio,
        "quartiles": quartiles,
        **to_others,
        "of_medians": round(medians["by hand"] / medians["hvdtrain"], 3),
    }


def drawing(hand: ByHand, draws: int, images: int) -> dict[str, Any]:
    """Times drawing `images` sequences with the cache, and without it: every 16th position, times
    16."""
    model: Any = hand.model.eval()
    start = int(hand.tokens[0, 0])
    prompts = hand.tokens.new_full((images, 1), start)
    found = continue_sequences(
        model, prompts, model.context + 1, tokens=start, temperature=1.0, seed=1
    )

    @torch.inference_mode()
    def without() -> None:
        for at in range(8, model.context + 1, 16):
            model(found[:, :at])

    def cached() -> None:
        continue_sequences(model, prompts, model.context + 1, tokens=start, temperature=1.0, seed=1)

    times = alternately(
        {"with the cache": cached, "a sixteenth without": without}, draws, hand.device
    )
    ratio, quartiles = spread(
        [
            16 * b / a
            for a, b in zip(times["with the cache"], times["a sixteenth without"], strict=True)
        ],
        2,
    )
    cached_s = statistics.median(times["with the cache"])
    return {
        "draws": draws,
        "images": images,
        "positions": model.context,
        "with_the_cache_s": round(cached_s, 3),
        "without_s": round(16 * statistics.median(times["a sixteenth without"]), 3),
        "ms_per_position": round(1e3 * cached_s / model.context, 3),
        "times_as_fast": ratio,
        "quartiles": quartiles,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--draws", type=int, default=7)
    parser.add_argument("--images", type=int, default=32)
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--accelerate", action="store_true", help="also Accelerate, which must be installed"
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="for both, as in model.layers=12"
    )
    options = parser.parse_args()
    with Signals(0) as signals:
        trainer = Trainer(
            [*JOB, f"log.every_steps={options.steps}", *options.overrides],
            SingleProcessCommunicator(),
            signals,
        )
        hand = ByHand(trainer)
        others = {"accelerate": WithAccelerate(trainer)} if options.accelerate else {}
        check_same_loss(trainer, hand)
        found: dict[str, Any] = (
            {"training": training(trainer, hand, others, options.rounds, options.steps)}
            if options.rounds
            else {}
        )
    if options.draws:
        found["drawing"] = drawing(hand, options.draws, options.images)
    facts = {
        "device": device_name(hand.device),
        "load": round(os.getloadavg()[0], 1),
        "torch": torch.__version__,
    }
    found = facts | {"words": options.overrides} | found
    print(json.dumps(found, indent=2))
    if options.json:
        append(options.json, found)


if __name__ == "__main__":
    main()
