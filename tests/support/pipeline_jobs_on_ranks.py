"""Loss curves of jobs on pipelines, and the files of a checkpoint, on the ranks.

A mesh is words of a configuration, as in parallel.pipeline=2,shard.stage=1.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import invariance
import nonfinite_on_ranks
import numpy as np
import shards_on_ranks
import torch
from parallel_on_ranks import CLIPPED, GPT, made_block_by_block

from hvdtrain.comm.communicator import Communicator, SingleProcessCommunicator
from hvdtrain.core.progress import Hyper
from hvdtrain.errors import Diverged
from hvdtrain.extras.pipeline.pipelined import Pipelined
from hvdtrain.frameworks.torch.precision import NAME as LOSS_SCALE
from hvdtrain.training.replicas.compare import check_equal

MLP = "model.name=mlp model.widths=[24,12,8] max_steps=6"
SGD = "optim.name=sgd optim.base_lr=0.2"
JOBS = {
    "gpt, tied": f"{GPT} model.tied=true evaluate.every_steps=3",
    "mlp": f"{MLP} {SGD}",
    "mlp, lamb": f"{MLP} optim.name=lamb optim.base_lr=0.02 optim.exclude=none {CLIPPED}",
    "gpt, recomputed": f"{GPT} model.recompute=all",
    "mlp, noise": f"{MLP} {SGD} recipe.gradient_noise=0.01 recipe.sample_noise=0.5 "
    "optim.base_batch=24 batch.micro=3 guard.nonfinite=skip",
    **{
        f"mlp, {rule}": f"{MLP} optim.name={rule} optim.base_lr=0.02 {CLIPPED}"
        for rule in ("adam", "novograd", "torch.optim.RMSprop")
    },
}
FEW = ("gpt, tied", "mlp, lamb")
HALF = (
    f"{GPT} data.side=4 optim.name=adamw optim.base_lr=0.005 model.residual_dropout=0.1 "
    "model.label_smoothing=0 batch.micro=8 max_steps=40"
)
OF_FILES = f"{MLP} optim.name=novograd optim.base_lr=0.02"


def altered(communicator: Communicator) -> list[str]:
    """Returns the errors of comparing ranks: first unchanged, then with a different copy of the
    tied weight on the last stage."""
    found: list[str] = []

    def compare(learner: Any) -> None:
        tied = learner.model.tokens.weight
        for change in (0.0, 1e-9):
            with torch.no_grad():
                tied[0, 0] += change * (communicator.rank == communicator.size - 1)
            try:
                check_equal(
                    communicator, learner, Hyper(0.1, 0.9, 0.0, 8, 0), ["n1"] * communicator.size
                )
                found.append("")
            except Diverged as error:
                found.append(error.what)

    invariance.losses(f"{JOBS['gpt, tied']} parallel.pipeline=2", communicator, compare)
    return found


def in_16_bits(communicator: Communicator) -> dict[str, dict]:
    """Returns the curves of stages in bf16 and fp16, and on rank 0 the curve of one process in 32
    bits."""
    found = (
        {"fp32": invariance.losses(f"{HALF} speed.precision=fp32", SingleProcessCommunicator())}
        if communicator.rank == 0
        else {}
    )
    for precision in ("bf16", "fp16"):
        found[precision] = invariance.losses(
            f"{HALF} speed.precision={precision} parallel.pipeline=2", communicator
        )
    return found


def overflow(communicator: Communicator) -> list[list[dict[str, Any]]]:
    """What each of three steps in fp16 did on each rank; in the second one a number of a gradient
    of the last stage is infinite."""
    words = (
        "speed.precision=fp16 guard.nonfinite=stop model.name=mlp model.widths=[8,8] "
        "parallel.pipeline=2"
    )
    learner: Any = nonfinite_on_ranks.learner(communicator, *words.split())
    passes = 0
    micro = [nonfinite_on_ranks.batch(7, seed) for seed in range(4)]

    def make_infinite(gradient: torch.Tensor) -> torch.Tensor:
        nonlocal passes
        passes += 1
        return (
            gradient.index_fill(0, torch.tensor([0]), torch.inf)
            if passes == len(micro) + 2
            else gradient
        )

    *_, last = learner.model.parameters()
    last.register_hook(make_infinite)  # called when the gradient is computed
    found = []
    for step in range(3):
        before = {name: np.array(array) for name, array in learner.state().items()}
        sums = learner.step(
            [learner.to_device(part) for part in micro], nonfinite_on_ranks.hyper(28, step), step
        )
        after = learner.state()
        changed = [
            name
            for name, array in before.items()
            if name != LOSS_SCALE and not np.array_equal(array, after[name])
        ]
        scale = float(learner.scale.tensors[LOSS_SCALE])
        found.append(
            {
                "changed": changed,
                "scale": scale,
                "nonfinite": float(sums["nonfinite"]),
                "passes of the last stage": passes,
            }
        )
    return communicator.allgather_object(found)


def curves(
    communicator: Communicator, folder: str, meshes: list[str], few: bool, faulty: bool
) -> dict[str, Any]:
    """By job and mesh; folder: of the checkpoints. Without a mesh: one process."""
    results: dict[str, Any] = {}
    for mesh in meshes or ("shard.stage=0",):
        options = mesh.replace(",", " ")
        jobs = {job: words_of for job, words_of in JOBS.items() if not few or job in FEW}
        for job, words_of in jobs.items():
            with made_block_by_block(job.startswith("gpt")):
                results[f"{job} / {mesh}"] = invariance.losses(
                    f"{words_of} {options}", communicator
                )
        results[f"files / {mesh}"] = shards_on_ranks.checkpoint(
            Path(folder, str(len(results))), f"{OF_FILES} {options}", communicator
        )
    if faulty:
        with mock.patch.object(
            Pipelined, "add_tied", lambda self: None
        ):  # each copy has its own stage's gradient
            results["altered"] = altered(communicator)
            results["faulty"] = invariance.losses(
                f"{JOBS['gpt, tied']} parallel.pipeline=2", communicator
            )
    return results


def half(communicator: Communicator) -> dict[str, Any]:
    """Compares jobs in 16 bits with one process in 32 bits, and makes a step in which a gradient of
    the last stage overflows."""
    return {"overflow": overflow(communicator), **in_16_bits(communicator)}
