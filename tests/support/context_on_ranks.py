"""What a Context does on several ranks with uneven shares, against formulas; then a mistake that
one rank alone makes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch

import hvdtrain as ht

X = np.arange(14, dtype=np.float64).reshape(7, 2)
DATA = {"x": X, "y": X.sum(1)}


def main(folder: str, mistake: str) -> None:  # noqa: PLR0915
    run = Path(folder)
    with ht.init(
        f"run={run}", "comm.engine=mpi", "log.every_steps=1", "checkpoint.every_steps=2"
    ) as ctx:
        model = torch.nn.Linear(2, 1).double().to(ctx.device)
        model.register_buffer("running_mean", torch.zeros(1, device=ctx.device))
        scaler = torch.amp.GradScaler(ctx.device.type, init_scale=8.0, growth_interval=3)
        torch.nn.init.constant_(model.weight, float(ctx.rank))  # rank 0's zeros count
        torch.nn.init.constant_(model.bias, float(ctx.rank))
        model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-2))
        assert ctx.resume() == {}
        weight = np.zeros(2)
        bias = 0.0
        counts = []
        for batch in ctx.samples(DATA, batch=2, epochs=2, seed=4):
            assert len(batch["x"]) == max(1, batch.count)
            counts.append(batch.count)
            own = batch["x"][: batch.count].tolist()
            everyone = np.array(
                [row for rows in ctx.mesh.world.allgather_object(own) for row in rows]
            )
            assert len(everyone) == 2
            error = everyone @ weight + bias - everyone.sum(1)
            gradient = np.append(error @ everyone, error.sum())  # 2 / 2 of the mean of squares
            overflows = batch.step == 2  # on rank 1 alone
            if not overflows:
                weight = weight - 1e-2 * gradient[:2]
                bias = bias - 1e-2 * gradient[2]
            loss = torch.nn.functional.mse_loss(model(batch["x"])[:, 0], batch["y"])
            assert abs(ctx.mean({"loss": loss})["loss"] - (error**2).mean()) < 1e-9
            ctx.backward(scaler.scale(loss * (math.inf if overflows and ctx.rank == 1 else 1)))
            if batch.step % 2:
                scaler.unscale_(optimizer)  # p.grad is the mean over the samples of all ranks
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
                np.testing.assert_allclose(norm.item(), np.linalg.norm(gradient), rtol=1e-12)
            scaler.step(optimizer)
            scaler.update()
            assert scaler.get_scale() == [8, 8, 4, 4, 4, 8, 8][batch.step], scaler.get_scale()
            np.testing.assert_allclose(model.weight.detach().cpu().numpy()[0], weight, rtol=1e-12)
            np.testing.assert_allclose(model.bias.item(), bias, rtol=1e-12)
            ctx.log(loss=loss, expected=float((error**2).mean()))
            ctx.checkpoint(model, optimizer)
            if mistake == "names" and batch.step == 3 and ctx.rank == 1:
                ctx.log(only_rank_1=1)
            if mistake == "means" and batch.step == 3:
                ctx.mean({"loss": 1} if ctx.rank else {"accuracy": 1, "loss": 1})
            if mistake == "raise" and batch.step == 3 and ctx.rank == 1:
                raise ValueError("of rank 1")
            assert not ctx.should_stop
        assert counts == [[0, 1, 1][ctx.rank]] * 7, counts
        evaluate(ctx, model)
    if ctx.rank == 0:
        lines = (json.loads(line) for line in (run / "events.jsonl").read_text().splitlines())
        steps = [event for event in lines if event["kind"] == "step"]
        assert len(steps) == 7
        for event in steps:
            assert abs(event["loss"] - event["logged"]["expected"]) < 1e-9, event
        print("all as computed by hand")


def evaluate(ctx: ht.Context, model: Any) -> None:
    """Means weighted by hand, and every sample once with statistics that are equal on all ranks."""
    weights = np.array([1, 2, 4])[ctx.rank]
    assert ctx.mean({"a": ctx.rank}, count=int(weights))["a"] == (0 * 1 + 1 * 2 + 2 * 4) / 7
    model.running_mean += ctx.rank
    rows = [(batch["x"][:, 0].tolist(), batch.count) for batch in ctx.each(DATA, batch=2)]
    assert model.running_mean.item() == 1.0, model.running_mean  # of 0, 1 and 2
    everyone = ctx.mesh.world.allgather_object([rows, [count for _, count in rows]])
    counts = [of_rank[1] for of_rank in everyone]
    assert counts == [[2, 0], [2, 0], [2, 1]], counts
    seen = sorted(
        value for of_rank in everyone for values, count in of_rank[0] for value in values[:count]
    )
    assert seen == sorted(DATA["x"][:, 0].tolist())
