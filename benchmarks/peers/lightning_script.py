"""Lightning: strategy ddp on two CPU processes, a DataLoader over a TensorDataset; no logger, checkpoints or progress bar.

mpirun -np 2 python benchmarks/peers/lightning_script.py --root DIR        needs: pip install -c constraints.txt lightning
"""  # noqa: E501

from __future__ import annotations

import argparse
import logging
import warnings
from typing import Any

import torch
from data import DDP, LR, MOMENTUM, Clock, images, network, normalized, parser, take_rank
from ddp_gloo import gather
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from hvdtrain.core.import_torchvision import import_torchvision

# Lightning imports it: without this, torchvision from PyPI cannot be imported with a CPU build of
# torch
import_torchvision()

import lightning  # noqa: E402
from lightning.pytorch.plugins.environments import LightningEnvironment  # noqa: E402
from lightning.pytorch.strategies import DDPStrategy  # noqa: E402


class Learner(lightning.LightningModule):
    """The network and its update."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.model = network(dropout)
        self.loss_sum = torch.zeros(())

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        x, y = batch
        loss = functional.cross_entropy(self.model(normalized(x)).float(), y)
        self.loss_sum += loss.detach()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=LR, momentum=MOMENTUM, fused=True)


class Blocks(lightning.Callback):
    """Starts and ends the blocks of the clock between steps."""

    def __init__(self, clock: Clock, options: argparse.Namespace) -> None:
        self._clock = clock
        self._options = options
        self._steps_done = -options.warmup

    def on_train_batch_end(self, trainer: Any, learner: Any, *_: Any) -> None:
        self._steps_done += 1
        if self._steps_done < 0 or self._steps_done % self._options.steps:
            return
        if self._steps_done:
            self._clock.end(float(learner.loss_sum) / self._options.steps)
        learner.loss_sum.zero_()
        self._clock.begin()


def main() -> None:
    options = parser(__doc__).parse_args()
    rank, size = take_rank()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", ".*does not have many workers.*")  # the data are in memory
    clock = Clock(options, gather)
    loader = DataLoader(
        TensorDataset(*images(options.root)), options.batch // size, shuffle=True, drop_last=True
    )
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=size,
        strategy=DDPStrategy(process_group_backend="gloo", **DDP),
        plugins=[
            LightningEnvironment()
        ],  # mpirun only starts the ranks: with mpi4py installed Lightning would start MPI too
        precision="bf16-mixed" if options.precision == "bf16" else "32-true",
        max_epochs=-1,
        max_steps=options.warmup + options.blocks * options.steps,
        callbacks=[Blocks(clock, options)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Learner(options.dropout), loader)
    clock.print_result(rank, "lightning", {"lightning": lightning.__version__})


if __name__ == "__main__":
    main()
