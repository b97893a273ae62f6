"""log.samples: sequences that the model generates at each evaluation, as a picture or a text."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvdtrain.config.read import expand
from hvdtrain.config.schema import Config
from hvdtrain.data.datasets.text import decode
from hvdtrain.data.field import Field
from hvdtrain.data.source import Source
from hvdtrain.data.tokenizer import read_tokenizer
from hvdtrain.errors import UserError
from hvdtrain.extras.sample.grid import grid
from hvdtrain.extras.sample.sampler import Sampler, draw_on_all_ranks, sampler_of
from hvdtrain.frameworks.learner import Learner
from hvdtrain.tasks.task import Task
from hvdtrain.training.health.heartbeat import Heartbeat
from hvdtrain.training.health.monitor import HealthMonitor
from hvdtrain.training.progress.train_state import TrainState
from hvdtrain.training.samples import png

COLUMNS = 16  # images side by side
STOP_CHECK_TOKENS = 64  # between two checks whether to stop: each costs one small allreduce


class _Stopped(Exception):
    """Raised if the job stops while sampling, on every rank at the same position."""


def sequences_of(
    config: Config,
    task: Task,
    val: Source,
    learner: Learner,
    heartbeat: Heartbeat,
    health: HealthMonitor,
) -> Sequences:
    """Returns the sequences that a job's model generates. Raises UserError if it generates none."""
    sampler = sampler_of(learner, config)
    if sampler is None or task.drawn is None:
        what = (
            f"log.samples={config.log.samples} draws tokens or masks, and the job has "
            f"task.name={task.name}"
        )
        raise UserError(
            what,
            config.where("log.samples"),
            "task.name=language or segmentation, or leave it out",
        )
    return Sequences(config, task.drawn, val, learner, sampler, heartbeat, health)


@dataclass
class Sequences:
    """Sequences of tokens that a model generates, with random numbers that depend only on the seed
    and are independent of training.

    Each begins with the first token of the validation set: for images, the start token.
    """

    config: Config
    tokens: Field
    val: Source
    learner: Learner
    sampler: Sampler
    heartbeat: Heartbeat
    health: HealthMonitor

    def draw(self, samples: int, now: TrainState) -> bytes | None:
        """Returns the content of a file, a PNG picture or a text; None if the job stops meanwhile.
        A collective. Raises UserError if the model cannot run token by token."""
        pictures = self.val.pictures
        positions = self.tokens.shape[0]
        try:
            drawn = draw_on_all_ranks(
                self.learner.data,  # the ranks of a tensor group sample the same sequences together
                self.sampler,
                np.tile(self.val.read(np.zeros(1, np.int64))["tokens"][:, :1], (samples, 1)),
                positions,
                tokens=self.tokens.values if pictures is None else pictures.values,
                temperature=1.0,
                seed=self.config.seed,
                at_once=self.config.batch.evaluate,
                before_each=self._keep_up(now),
            )
        except _Stopped:
            return None
        if pictures is None:
            return self._texts(drawn).encode()
        side = math.isqrt(positions - 1)
        images = pictures.decode(drawn[:, 1:]).reshape(len(drawn), side, side, -1)
        return png(grid(images, COLUMNS))

    def _keep_up(self, now: TrainState) -> Callable[[], None]:
        """Returns a function for each position, also called on ranks without sequences: it signals
        progress, and at intervals all ranks agree whether to stop."""
        positions = itertools.count(1)

        def before_each() -> None:
            self.heartbeat.beat("drawing samples", now.progress.epoch, now.progress.step)
            if next(positions) % STOP_CHECK_TOKENS == 0 and self.health.agree_to_stop():
                raise _Stopped

        return before_each

    def _texts(self, drawn: np.ndarray) -> str:
        path: Any = self.config.data.options.get("tokenizer")
        tokenizer = read_tokenizer(expand(path, "data.tokenizer")) if path else None
        return (
            "\n".join(
                f"--- {number}\n{decode(tokens, tokenizer)}"
                for number, tokens in enumerate(drawn, start=1)
            )
            + "\n"
        )
