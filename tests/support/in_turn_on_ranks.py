"""Loops of several models that step in turn, as the ranks of this start make them, each against
plain torch in one process; one that resumes; and a mistake of one rank."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import hvdtrain as ht
from hvdtrain.data.sampler import positions_of_rank

# uneven shares, and batches across the ends of epochs
SAMPLES = 50
BATCH = 7
EPOCHS = 3
SEED = 1
numbers = np.random.default_rng(0)
DATA = {"x": numbers.standard_normal((SAMPLES, 2)), "z": numbers.standard_normal((SAMPLES, 3))}
Nets = dict[str, torch.nn.Module]
Optimizers = dict[str, torch.optim.Optimizer]
Backward = Callable[[torch.Tensor], object]


def net(inputs: int, outputs: int) -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(inputs, 5), torch.nn.Tanh(), torch.nn.Linear(5, outputs)
    ).double()


def gan(
    nets: Nets, optimizers: Optimizers, backward: Backward, batch: Any, step: int
) -> torch.Tensor:
    """As of torch's DCGAN tutorial: two backward passes before the discriminator's step, and the
    generator's loss through the discriminator."""
    bce = torch.nn.functional.binary_cross_entropy_with_logits
    optimizers["discriminator"].zero_grad()
    of_real = nets["discriminator"](batch["x"])
    backward(bce(of_real, torch.ones_like(of_real)))
    fake = nets["generator"](batch["z"])
    of_fake = nets["discriminator"](fake.detach())
    backward(bce(of_fake, torch.zeros_like(of_fake)))
    optimizers["discriminator"].step()
    nets["generator"].zero_grad()  # the module's, as in the tutorial
    of_fake = nets["discriminator"](fake)
    loss = bce(of_fake, torch.ones_like(of_fake))
    backward(loss)
    optimizers["generator"].step()
    nets["average"].update_parameters(nets["generator"])  # type: ignore[operator]
    return loss


def actor_critic(
    nets: Nets, optimizers: Optimizers, backward: Backward, batch: Any, step: int
) -> torch.Tensor:
    """The critic steps twice, towards a target by the average of the actor; the actor steps in each
    second batch, through a critic that is frozen from then on, also in checkpoints."""
    state = batch["z"]
    nets["critic"].requires_grad_(requires_grad=True)
    for _ in range(2):
        optimizers["critic"].zero_grad()
        with torch.no_grad():
            target = batch["x"][:, :1] + 0.5 * nets["average"](state)[:, :1]
        value = nets["critic"](torch.cat([state, batch["x"]], 1))
        loss = torch.nn.functional.mse_loss(value, target)
        backward(loss)
        optimizers["critic"].step()
    nets["critic"].requires_grad_(requires_grad=False)
    if step % 2:
        optimizers["actor"].zero_grad()
        backward(-nets["critic"](torch.cat([state, nets["actor"](state)], 1)).mean())
        optimizers["actor"].step()
        nets["average"].update_parameters(nets["actor"])  # type: ignore[operator]
    return loss


WORK = {"gan": gan, "actor_critic": actor_critic}
SHAPES = {
    "gan": {"generator": (3, 2), "discriminator": (2, 1)},
    "actor_critic": {"actor": (3, 2), "critic": (5, 1)},
}
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.02, weight_decay=0.01),
}


def made(work: str, optimizer: str, seed: int) -> tuple[Nets, Optimizers]:
    torch.manual_seed(seed)
    nets: Nets = {name: net(*shape) for name, shape in SHAPES[work].items()}
    optimizers = {name: OPTIMIZERS[optimizer](one.parameters()) for name, one in nets.items()}
    averaged = next(iter(nets.values()))
    nets["average"] = AveragedModel(averaged, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    return nets, optimizers


def schedule_of(optimizers: Optimizers) -> torch.optim.lr_scheduler.LRScheduler:
    """Of the optimizer that steps in every batch."""
    return torch.optim.lr_scheduler.StepLR(list(optimizers.values())[-1], 6, 0.7)


def by_plain_torch(work: str, optimizer: str, steps: int) -> Nets:
    nets, optimizers = made(work, optimizer, 0)
    schedule = schedule_of(optimizers)
    for step in range(steps):
        rows = positions_of_rank(BATCH * step, BATCH, 0, 1, SAMPLES, SEED).samples
        batch = {name: torch.from_numpy(array[rows]) for name, array in DATA.items()}
        WORK[work](nets, optimizers, lambda loss: loss.backward(), batch, step)
        schedule.step()
    return nets


def weights(nets: Nets) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for one in nets.values() for p in one.parameters()])


def trained(way: str, run: str = "", epochs: float = EPOCHS, mistake: str = "") -> dict[str, Any]:
    """way: "gan sgd key=value ..."."""
    work, optimizer, *arguments = way.split()
    with ht.init(*arguments, *([f"run={run}"] if run else [])) as ctx:
        nets, optimizers = made(work, optimizer, ctx.rank)  # rank 0's weights count
        for name in optimizers:
            nets[name], optimizers[name] = ctx.prepare(nets[name], optimizers[name], name=name)
        nets["average"] = ctx.prepare(nets["average"], name="average")
        schedule = schedule_of(optimizers)
        state = ctx.resume() if run else {}
        schedule.load_state_dict(state.get("schedule", schedule.state_dict()))
        began = ctx.step
        losses = dict(state.get("losses", {}))
        for batch in ctx.samples(DATA, batch=BATCH, epochs=epochs, seed=SEED):
            if mistake and ctx.rank == 1 and batch.step == 3:
                optimizers = dict(zip(optimizers, reversed(optimizers.values()), strict=True))
            loss = WORK[work](nets, optimizers, ctx.backward, batch, batch.step)
            schedule.step()
            ctx.log(loss=loss)
            losses[f"{batch.step + 1}"] = ctx.mean({"loss": loss})["loss"]
            if run:
                ctx.checkpoint(losses=losses, schedule=schedule)
        steps = ctx.step
    expected = by_plain_torch(work, optimizer, steps)
    return {
        "way": way,
        "size": ctx.size,
        "rank": ctx.rank,
        "began": began,
        "steps": steps,
        "losses": losses,
        "difference": float((weights(nets) - weights(expected)).abs().max()),
        "moved": float((weights(nets) - weights(made(work, optimizer, 0)[0])).abs().max()),
    }


def main(out: str, run: str, epochs: str, mistake: str, *ways: str) -> None:
    """Makes each way; the first one also with checkpoints in the folder `run`, until `epochs`; then
    once more with a mistake of rank 1, if there is one. Rank 0 writes the results."""
    results = [trained(way) for way in ways]
    results.append(
        trained(f"{ways[0]} checkpoint.every_steps=5 log.every_steps=5", run, float(epochs))
    )
    if results[0]["rank"] == 0:
        Path(out).write_text(json.dumps(results))
    if mistake:
        trained(ways[0], mistake=mistake)
