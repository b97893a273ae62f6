"""A loop of 15 lines on this rank, which takes [--kill STEP RANK] [--signal STEP RANK] [--run PLAN]
key=value ...

Rank 0 writes the weights, the losses and how the loop ended; --kill and --signal send a rank
SIGKILL or SIGUSR2 after a step. --run: hvdtrain.run() calls the loop, of ranks that kill themselves
by a plan of killed_ranks.py.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from killed_ranks import die_at, parse

import hvdtrain as ht
from hvdtrain.comm.launcher_variables import placement

# uneven shares, and batches across the ends of epochs
SAMPLES = 100
BATCH = 7
EPOCHS = 3


def main(out: str, *words: str) -> int:
    faults = {}
    arguments = list(words)
    while arguments and arguments[0] in ("--kill", "--signal"):
        faults[int(arguments[1]), int(arguments[2])] = {
            "--kill": signal.SIGKILL,
            "--signal": signal.SIGUSR2,
        }[arguments[0]]
        arguments = arguments[3:]
    keys = ("checkpoint.every_steps=10", "log.every_steps=5")
    if arguments and arguments[0] == "--run":
        die_at([kill for kill in parse(arguments[1]) if kill.rank == placement(os.environ).rank])
        return ht.run(lambda ctx: loop(ctx, out, faults), *keys, *arguments[2:])
    return loop(ht.init(*keys, *arguments), out, faults)


def loop(ctx: ht.Context, out: str, faults: Mapping[tuple[int, int], int]) -> int:
    x = np.random.default_rng(0).uniform(-1, 1, (SAMPLES, 3))
    losses = {}
    notes = []
    torch.manual_seed(ctx.rank)  # another model on each rank: rank 0's is used
    net = (
        torch.nn.Sequential(
            torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1), torch.nn.Flatten(0)
        )
        .double()
        .to(ctx.device)
    )
    optimizer = torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.9)
    model, optimizer = ctx.prepare(net, optimizer)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [9, 21], 0.5)
    state = ctx.resume()
    if state:
        scheduler.load_state_dict(state["scheduler"])
        notes = state["notes"]
    began = ctx.step

    def loss_of(part: Any) -> torch.Tensor:
        return torch.nn.functional.mse_loss(model(part["x"]), part["y"])

    for batch in ctx.samples({"x": x, "y": x.prod(1)}, batch=BATCH, epochs=EPOCHS, seed=1):
        if batch.step % 3 == 2:  # 4, 2 or 2 parts on 1, 2 or 3 ranks
            loss = ctx.accumulate(loss_of, at_most=2)
        else:
            loss = loss_of(batch)
            ctx.backward(loss)
        optimizer.step()
        scheduler.step()
        ctx.log(loss=loss)
        losses[batch.step + 1] = ctx.mean({"loss": loss})["loss"]
        notes = [*notes[-1:], batch.step + 1]
        ctx.checkpoint(model, optimizer, scheduler=scheduler, notes=notes)
        if not began and (batch.step + 1, ctx.rank) in faults:  # the first start alone
            while not (
                Path(ctx.run or "") / "checkpoints" / f"step-{batch.step // 10 * 10:08d}"
            ).is_dir():
                time.sleep(0.01)  # it is written in the background
            os.kill(os.getpid(), faults[batch.step + 1, ctx.rank])
        if ctx.should_stop:
            break
    # of shard.stage=3 whole
    weights = {
        name: getattr(p, "full_tensor", lambda p=p: p)().tolist()
        for name, p in net.state_dict().items()
    }
    steps = ctx.step
    code = ctx.close()
    if ctx.rank == 0:
        result = {
            "weights": weights,
            "own_numbers": sum(
                getattr(p, "to_local", lambda p=p: p)().numel() for p in net.parameters()
            ),  # of the weights on this rank
            "losses": losses,
            "began": began,
            "steps": steps,
            "lr": optimizer.param_groups[0]["lr"],
            "notes": notes,
        }
        Path(out).write_text(json.dumps(result))
    return code


if (
    __name__ == "__main__"
):  # as a script of a user's: launch --elastic looks for the run folder in its words
    sys.exit(main(*sys.argv[1:]))
