"""A custom loop, as the ranks of this start make it in one way after the other: weights,
losses and an evaluation of each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

import hvdtrain as ht
from hvdtrain.data.sampler import positions_of_rank
from hvdtrain.frameworks.torch.models import gpt
from hvdtrain.frameworks.torch.pipeline_unit import Unit

# uneven shares, and batches across the ends of epochs
SAMPLES = 50
BATCH = 5
STEPS = 12


class Net(torch.nn.Module):
    """Layers that tensor ranks, stages and parallel.dense may have parts of."""

    dense_part = "dense"

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(6, 8)
        self.dense = torch.nn.Sequential(
            torch.nn.Linear(8, 12), torch.nn.Tanh(), torch.nn.Linear(12, 4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dense(torch.tanh(self.first(x)))  # type: ignore[no-any-return]

    def tensor_plan(self) -> dict[str, str]:
        return {"dense.0": "columns", "dense.2": "rows"}

    def pipeline_units(self) -> list[Unit]:
        first = Unit("first", (self.first,), lambda x: torch.tanh(self.first(x)))
        return [
            first,
            *(
                Unit(f"dense.{name}", (layer,), layer)
                for name, layer in self.dense.named_children()
            ),
        ]


def main(out: str, *ways: str) -> None:
    """ways: "key=value key=value ...", with "until=STEP" first for a part of the steps, "gpt" for a
    model of tokens, "counted" for a mean over the targets that count, of which some parts and ranks
    have none.

    Rank 0 writes the results.
    """
    results = [trained(way.split()) for way in ways]
    if results[0]["rank"] == 0:
        Path(out).write_text(json.dumps(results))


def trained(arguments: list[str]) -> dict[str, Any]:  # noqa: PLR0915
    until = STEPS
    if arguments and arguments[0].startswith("until="):
        until = int(arguments[0].removeprefix("until="))
        arguments = arguments[1:]
    x = np.random.default_rng(0).uniform(-1, 1, (SAMPLES, 6))
    y = np.random.default_rng(1).uniform(-1, 1, (SAMPLES, 4))
    compute: Any = torch.nn.functional.mse_loss
    if is_gpt := "gpt" in arguments:
        arguments.remove("gpt")
        y = np.arange(SAMPLES * 5).reshape(SAMPLES, 5) ** 2 % 7
        x = (x[:, :5] * 3 + 3).astype(np.int64)
        compute = next_tokens_loss
    data = {"x": x, "y": y}
    if is_counted := "counted" in arguments:
        arguments.remove("counted")
        data = counted_data()
        compute = mean_of_counted
    ctx = ht.init("log.every_steps=4", *arguments)
    torch.manual_seed(ctx.rank)  # another model on each rank: rank 0's is used
    net = (
        (gpt.build("gpt", 5, 7, layers=2, heads=2, width=8) if is_gpt else Net())
        .double()
        .to(ctx.device)
    )
    optimizer = torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.9, weight_decay=0.01)
    model, optimizer = ctx.prepare(net, optimizer, example=torch.from_numpy(x[:4]))
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [4, 8], 0.5)
    if has_folder := any(word.startswith("run=") for word in arguments):
        state = ctx.resume()
        if state:
            scheduler.load_state_dict(state["scheduler"])
    losses = []

    def loss_of(part: Any) -> Any:
        outputs = model(part["x"])
        return (
            compute(outputs, part["y"])
            if not is_counted
            else (compute(outputs, part["y"], part["counts"]), part["counts"].sum())
        )

    for batch in ctx.samples(data, batch=BATCH, epochs=until * BATCH / SAMPLES, seed=1):
        if is_counted and batch.step % 2 and ctx.mesh.pipe.size == 1:
            loss, count = loss_of(batch)
            ctx.backward(loss, count=count)
        else:
            loss = ctx.accumulate(loss_of, at_most=3)
        optimizer.step()
        scheduler.step()
        losses.append(ctx.mean({"loss": loss})["loss"])
        if has_folder:
            ctx.checkpoint(model, optimizer, scheduler=scheduler)
    total = 0.0
    items = 0.0
    model.eval()
    with torch.no_grad():
        for batch in ctx.each(data, batch=9):
            loss, count = loss_of(batch) if is_counted else (loss_of(batch), batch.count)
            count = float(count) if batch.count else 0.0
            total += float(loss) * count if count else 0.0
            items += count
    state = ctx._loop.learner.state()
    result = {
        "weights": {
            name: array.tolist() for name, array in state.items() if not name.startswith("s.")
        },
        "losses": losses,
    }
    evaluated = ctx.mean({"loss": total / max(1.0, items)}, count=items)["loss"]
    result |= {"rank": ctx.rank, "says": ctx._loop.learner.describe(), "evaluated": evaluated}
    ctx.close()
    return result


def counted_data() -> dict[str, np.ndarray]:
    """Half of the targets count, and none of every other sample."""
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, (SAMPLES, 6))
    y = rng.uniform(-1, 1, (SAMPLES, 4))
    counts = rng.integers(0, 2, (SAMPLES, 4)).astype(np.float64)
    counts[rng.permutation(SAMPLES)[: SAMPLES // 2]] = 0
    return {"x": x, "y": y, "counts": counts}


def mean_of_counted(
    outputs: torch.Tensor, targets: torch.Tensor, counts: torch.Tensor
) -> torch.Tensor:
    """Returns the mean of squares over the targets that count; NaN if none counts."""
    return ((outputs - targets).square() * counts).sum() / counts.sum()


def plain_counted() -> dict[str, np.ndarray]:
    """The weights that "counted" ends with, of whole batches, by torch alone."""
    data = {name: torch.from_numpy(array) for name, array in counted_data().items()}
    torch.manual_seed(0)
    net = Net().double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.9, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [4, 8], 0.5)
    for step in range(STEPS):
        rows = torch.from_numpy(positions_of_rank(BATCH * step, BATCH, 0, 1, SAMPLES, 1).samples)
        optimizer.zero_grad()
        mean_of_counted(net(data["x"][rows]), data["y"][rows], data["counts"][rows]).backward()
        optimizer.step()
        scheduler.step()
    return {name: p.detach().numpy() for name, p in net.named_parameters()}


def next_tokens_loss(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
    """The mean cross entropy of logits (n, m, vocabulary) and tokens (n, m)."""
    return torch.nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def local_steps(_: str) -> None:
    """Compares comm.local_steps=2 with the same arithmetic in NumPy, of which each rank computes
    its part."""
    x = np.random.default_rng(0).uniform(-1, 1, (16, 3))
    ctx = ht.init("comm.engine=mpi", "comm.local_steps=2", "log.every_steps=4")
    model = torch.nn.Linear(3, 1, bias=False, dtype=torch.float64)
    torch.nn.init.constant_(model.weight, 0.5)
    model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    w = np.full(3, 0.5)
    momentum = np.zeros(3)
    for batch in ctx.samples({"x": x, "y": x.sum(1)}, batch=4, epochs=1, seed=1):
        of_rank = batch["x"].numpy()
        y = batch["y"].numpy()
        ctx.backward(torch.nn.functional.mse_loss(model(batch["x"])[:, 0], batch["y"]))
        optimizer.step()
        momentum = 0.9 * momentum + 2 * of_rank.T @ (of_rank @ w - y) / len(y)
        w = w - 0.1 * momentum
        if batch.step % 2:
            w, momentum = (
                np.asarray(ctx.mesh.world.allreduce(each.copy(), "by hand")) / ctx.size
                for each in (w, momentum)
            )
        np.testing.assert_allclose(model.weight.detach().numpy()[0], w, rtol=0, atol=1e-14)
    ctx.close()
    if ctx.rank == 0:
        print("as by hand")
