"""A script's own loop, as the ranks of this start make it in one way after the other: weights, losses and an evaluation of each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

import hvdtrain as ht
from hvdtrain.frameworks.torch.models import gpt
from hvdtrain.frameworks.torch.parallel.pipeline.stages import Unit

SAMPLES, BATCH, STEPS = 50, 5, 12  # uneven shares, and batches across the ends of epochs


class Net(torch.nn.Module):
    """Layers that tensor ranks, stages and parallel.dense may have parts of."""

    dense_part = "dense"

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(6, 8)
        self.dense = torch.nn.Sequential(torch.nn.Linear(8, 12), torch.nn.Tanh(), torch.nn.Linear(12, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dense(torch.tanh(self.first(x)))  # type: ignore[no-any-return]

    def tensor_plan(self) -> dict[str, str]:
        return {"dense.0": "columns", "dense.2": "rows"}

    def pipeline_units(self) -> list[Unit]:
        first = Unit("first", (self.first,), lambda x: torch.tanh(self.first(x)))
        return [first, *(Unit(f"dense.{name}", (layer,), layer) for name, layer in self.dense.named_children())]


def main(out: str, *ways: str) -> None:
    """ways: "key=value key=value ...", with "until=STEP" first for a part of the steps, "gpt" for a model of tokens.

    Rank 0 writes what each gave.
    """
    results = [trained(way.split()) for way in ways]
    if results[0]["rank"] == 0:
        Path(out).write_text(json.dumps(results))


def trained(arguments: list[str]) -> dict[str, Any]:
    until = STEPS
    if arguments and arguments[0].startswith("until="):
        until, arguments = int(arguments[0].removeprefix("until=")), arguments[1:]
    x = np.random.default_rng(0).uniform(-1, 1, (SAMPLES, 6))
    y = np.random.default_rng(1).uniform(-1, 1, (SAMPLES, 4))
    compute: Any = torch.nn.functional.mse_loss
    if is_gpt := "gpt" in arguments:
        arguments.remove("gpt")
        y, x, compute = np.arange(SAMPLES * 5).reshape(SAMPLES, 5) ** 2 % 7, (x[:, :5] * 3 + 3).astype(np.int64), next_tokens_loss
    ctx = ht.init("log.every_steps=4", *arguments)
    torch.manual_seed(ctx.rank)  # another model on each rank: that of rank 0 counts
    net = (gpt.build("gpt", 5, 7, layers=2, heads=2, width=8) if is_gpt else Net()).double().to(ctx.device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.9, weight_decay=0.01)
    model, optimizer = ctx.prepare(net, optimizer, example=torch.from_numpy(x[:4]))
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [4, 8], 0.5)
    if has_folder := any(word.startswith("run=") for word in arguments):
        state = ctx.resume()
        if state:
            scheduler.load_state_dict(state["scheduler"])
    losses = []

    def loss_of(part: Any) -> torch.Tensor:
        return compute(model(part["x"]), part["y"])  # type: ignore[no-any-return]

    for _ in ctx.samples({"x": x, "y": y}, batch=BATCH, epochs=until * BATCH / SAMPLES, seed=1):
        loss = ctx.accumulate(loss_of, at_most=3)
        optimizer.step()
        scheduler.step()
        losses.append(ctx.mean({"loss": loss})["loss"])
        if has_folder:
            ctx.checkpoint(model, optimizer, scheduler=scheduler)
    means = []
    model.eval()
    with torch.no_grad():
        for batch in ctx.each({"x": x, "y": y}, batch=9):
            means.append(ctx.mean({"loss": loss_of(batch)}, count=batch.count)["loss"] * batch.count)
    state = ctx._learner.state()
    result = {"weights": {name: array.tolist() for name, array in state.items() if not name.startswith("s.")}, "losses": losses}
    result |= {"rank": ctx.rank, "says": ctx._learner.describe(), "evaluated": ctx.mean({"sum": sum(means)})["sum"] * ctx.mesh.data.size}
    ctx.close()
    return result


def next_tokens_loss(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
    """The mean cross entropy of logits (n, m, vocabulary) and tokens (n, m)."""
    return torch.nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def local_steps(_: str) -> None:
    """comm.local_steps=2 beside the same arithmetic in numpy, of which each rank does its part."""
    x = np.random.default_rng(0).uniform(-1, 1, (16, 3))
    ctx = ht.init("comm.engine=mpi", "comm.local_steps=2", "log.every_steps=4")
    model = torch.nn.Linear(3, 1, bias=False, dtype=torch.float64)
    torch.nn.init.constant_(model.weight, 0.5)
    model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    w, momentum = np.full(3, 0.5), np.zeros(3)
    for batch in ctx.samples({"x": x, "y": x.sum(1)}, batch=4, epochs=1, seed=1):
        of_rank, y = batch["x"].numpy(), batch["y"].numpy()
        ctx.backward(torch.nn.functional.mse_loss(model(batch["x"])[:, 0], batch["y"]))
        optimizer.step()
        momentum = 0.9 * momentum + 2 * of_rank.T @ (of_rank @ w - y) / len(y)
        w = w - 0.1 * momentum
        if batch.step % 2:
            w, momentum = (np.asarray(ctx.mesh.world.allreduce(each.copy(), "by hand")) / ctx.size for each in (w, momentum))
        np.testing.assert_allclose(model.weight.detach().numpy()[0], w, rtol=0, atol=1e-14)
    ctx.close()
    if ctx.rank == 0:
        print("as by hand")
