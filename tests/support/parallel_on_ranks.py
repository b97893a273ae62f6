"""The loss curves of jobs on meshes, and the files of a checkpoint, on the ranks.

A mesh is words of a configuration, as in parallel.tensor=2,shard.stage=1; none: one process; with
parallel.sequence=true the jobs of gpt. few: some jobs. On two ranks of mpi the job "unsummed" is
one in which ranks do not add up the gradients that their parts of a layer give, which the test must
notice; with parallel.sequence=true "positions" has the losses of a job, and of one whose ranks do
not add up those of norms and positions, "masks" says what dropout drops.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import invariance
import shards_on_ranks
import torch

from hvdtrain.comm.communicator import Buffer, Communicator, Op
from hvdtrain.core.arrays import digest
from hvdtrain.errors import UserError
from hvdtrain.extras.divided import block_by_block, deferred

GPT = (
    "task.name=language data.name=digit_tokens:windows model.name=gpt model.layers=2 "
    "model.heads=4 model.width=24 "
    "optim.name=sgd optim.base_lr=0.05 max_steps=4 batch.micro=4 model.label_smoothing=0.1"
)
MLP = "model.name=mlp model.widths=[24,8] max_steps=6"
NINE_PIXELS = "data.side=3 data.samples=1500 data.val_samples=50"
UNEVEN = f"{GPT} {NINE_PIXELS} optim.clip_norm=0.5"  # 9 positions, 17 tokens
CLIPPED = "optim.clip_norm=0.5 optim.clip_value=0.1 batch.micro=5"
JOBS = {
    "gpt": GPT,
    "gpt, empty shares": f"{GPT} batch.size=5 batch.micro=1",
    "gpt, uneven": f"{UNEVEN} model.tied=true model.recompute=all recipe.gradient_noise=0.01",
    "gpt, uneven, lamb": f"{UNEVEN} optim.name=lamb optim.base_lr=0.02 optim.exclude=none "
    "optim.clip_value=0.1 evaluate.every_steps=3 "
    "batch.size=5 batch.micro=1",  # shares are uneven, and some empty
    "gpt, tied, recomputed": f"{GPT} model.tied=true model.recompute=all",
    "mlp": f"{MLP} optim.name=sgd optim.base_lr=0.2 batch.micro=3",
    "mlp, noise": f"{MLP} optim.name=sgd optim.base_lr=0.2 recipe.gradient_noise=0.01",
    **{
        f"mlp, {rule}": f"{MLP} optim.name={rule} optim.base_lr=0.02 optim.exclude=none "
        f"{CLIPPED}{' optim.mode=scale' * (rule == 'larc')}"
        for rule in ("lars", "larc", "lamb", "novograd", "adam", "adamw")
    },
    "own weights": "model.name=parallel_on_ranks:OwnWeights optim.base_lr=0.05 max_steps=4",
}


FEW = (
    "gpt, empty shares",
    "gpt, tied, recomputed",
    "mlp",
    "mlp, lamb",
    "mlp, lars",
    "mlp, novograd",
)
FEW_OF_POSITIONS = ("gpt, uneven", "gpt, uneven, lamb")
OF_FILES = {"files": JOBS["mlp, novograd"], "files of gpt": f"{GPT} optim.name=novograd"}
DROPPED = 0.25


def jobs_on(mesh: str, few: bool) -> list[str]:
    """Returns the names of a mesh's jobs; with parts of the positions only jobs whose models have
    positions."""
    has_positions = "parallel.sequence=true" in mesh
    some = FEW_OF_POSITIONS if has_positions else FEW if mesh else FEW + FEW_OF_POSITIONS
    return [
        job for job in JOBS if (job in some if few else job.startswith("gpt") or not has_positions)
    ]


def files_on(mesh: str) -> list[str]:
    return (
        list(OF_FILES)[1:]
        if "parallel.sequence=true" in mesh
        else list(OF_FILES)[: 1 if mesh else 2]
    )


class Unsummed:
    """A communicator that does not add up gradients between tensor ranks: its allreduce returns
    what it is given, of names that begin and end so; all else is the real communicator's.
    """

    def __init__(
        self, communicator: object, names: tuple[str, str] = ("tensor.", ".backward")
    ) -> None:
        self._communicator = communicator
        self._names = names

    def __getattr__(self, name: str) -> object:
        return getattr(self._communicator, name)

    def allreduce(self, x: Buffer, name: str, op: Op = "sum") -> Buffer:
        first, last = self._names
        return (
            x
            if name.startswith(first) and name.endswith(last)
            else self._communicator.allreduce(x, name, op)
        )

    def split(self, color: int | None) -> object:
        return Unsummed(self._communicator.split(color), self._names)


class OwnWeights(torch.nn.Module):
    """A model whose initial weights ignore the seed and differ between ranks: all ranks train with
    rank 0's."""

    def __init__(self, shape: tuple[int, int, int], classes: int) -> None:
        super().__init__()
        rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", "0"))
        self.hidden = torch.nn.Linear(math.prod(shape), 70)
        self.last = torch.nn.Linear(70, classes)
        with torch.no_grad():
            self.hidden.weight.copy_(
                torch.randn(70, math.prod(shape), generator=torch.Generator().manual_seed(rank)) / 8
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.hidden(x.flatten(1))))

    def tensor_plan(self) -> dict[str, str]:
        return {"hidden": "columns", "last": "rows"}


class HalfAPlan(OwnWeights):
    """What follows the cut layer is whole."""

    def tensor_plan(self) -> dict[str, str]:
        return {"hidden": "columns"}


class CutOutputs(OwnWeights):
    def tensor_plan(self) -> dict[str, str]:
        return {"last": "columns"}


def refusal(model: str, communicator: object) -> str:
    try:
        invariance.losses(
            f"model.name=parallel_on_ranks:{model} parallel.tensor=2 max_steps=2", communicator
        )
    except UserError as error:
        return str(error)
    return ""


def masks(mesh: str, communicator: object) -> dict[str, list]:
    """Returns for each rank a digest of what the first block's dropout dropped in the first step,
    the dropped share, and the scale of the rest."""
    found: dict[str, list] = {"digests": [], "shares": [], "scales": []}

    def see(module: torch.nn.Module, inputs: tuple[torch.Tensor], outputs: torch.Tensor) -> None:
        if module.training and not found["digests"]:
            kept = outputs != 0
            found["digests"].append(digest({"kept": kept.numpy()}))
            found["shares"].append(1 - float(kept.double().mean()))
            found["scales"].append(float((outputs / inputs[0]).detach()[kept].mean()))

    def hook(learner: Any) -> None:
        learner.model.blocks[0].dropout.register_forward_hook(see)

    invariance.losses(
        f"{GPT} model.residual_dropout={DROPPED} max_steps=2 {mesh.replace(',', ' ')}",
        communicator,
        hook,
    )
    everyone = communicator.allgather_object(found)
    return {name: [one[name][0] for one in everyone] for name in found}


@contextlib.contextmanager
def made_block_by_block(wanted: bool) -> Iterator[None]:
    """Inside, models are as large models are, however small they are."""
    if not wanted:
        yield
        return
    with (
        mock.patch.object(block_by_block, "WHOLE_BYTES", 0),
        mock.patch.object(deferred, "SMALL", 64),
    ):
        yield


def curves(
    communicator: Communicator, engine: str, folder: str, meshes: list[str], few: bool
) -> dict[str, Any]:
    """By job and mesh; folder: of the checkpoints. Without a mesh: one process."""
    results: dict[str, Any] = {}
    for mesh in meshes or ("",):
        options = mesh.replace(",", " ")
        for job in jobs_on(mesh, few):
            with made_block_by_block(job.startswith("gpt")):
                results[f"{job} / {mesh}"] = invariance.losses(
                    f"{JOBS[job]} {options}", communicator
                )
        for name in files_on(mesh):
            run = Path(folder, str(len(results)))
            results[f"{name} / {mesh}"] = shards_on_ranks.checkpoint(
                run, f"{OF_FILES[name]} {options}", communicator
            )
    if engine == "mpi" and communicator.size == 2:
        results["refused"] = {
            model: refusal(model, communicator) for model in ("HalfAPlan", "CutOutputs")
        }
        results["unsummed"] = invariance.losses(
            f"{JOBS['gpt, tied, recomputed']} {meshes[0].replace(',', ' ')}", Unsummed(communicator)
        )
        if "parallel.sequence=true" in meshes[-1]:
            unsummed = Unsummed(communicator, ("gradients of positions", ""))
            steep = f"{JOBS['gpt, uneven']} optim.base_lr=1 {meshes[-1].replace(',', ' ')}"
            results["positions"] = [
                invariance.losses(steep, each)["losses"] for each in (communicator, unsummed)
            ]
            results["masks"] = masks(meshes[-1], communicator)
    return results
