"""Samples that a model generates, or masks that it predicts, computed by all ranks together and
written as files for the report."""

from __future__ import annotations

import io
import itertools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.comm.communicator import Communicator
from hvdtrain.config.read import expand
from hvdtrain.config.schema import Config
from hvdtrain.core.extras import maps, maps_module
from hvdtrain.data.sampler import evaluation_batches
from hvdtrain.data.source import Source
from hvdtrain.errors import UserError
from hvdtrain.events.log import Log
from hvdtrain.events.terminal import warn
from hvdtrain.frameworks.learner import Learner, Sampler
from hvdtrain.tasks.task import Task
from hvdtrain.training.checkpoint.files import OpenFolder
from hvdtrain.training.health.heartbeat import Heartbeat
from hvdtrain.training.health.monitor import HealthMonitor
from hvdtrain.training.progress.train_state import TrainState


def draw_on_all_ranks(
    communicator: Communicator,
    learner: Sampler,
    prompts: np.ndarray,
    length: int,
    *,
    tokens: int,
    temperature: float,
    top_k: int | None = None,
    seed: int,
    at_once: int,
    before_each: Callable[[], None],
) -> np.ndarray:
    """Continues prompts, int64 (n, m), to int64 (n, length), as Sampler.continue_sequences() does.
    A collective.

    at_once: sequences that a rank continues together. before_each() is called before each position,
    equally often on every rank.
    """
    mine = [np.empty((0, length), np.int64)]
    for rows in evaluation_batches(len(prompts), at_once, communicator.rank, communicator.size):
        first = int(rows[0]) if len(rows) else 0
        mine.append(
            learner.continue_sequences(
                prompts[rows],
                length,
                tokens=tokens,
                temperature=temperature,
                top_k=top_k,
                seed=seed,
                first=first,
                before_each=before_each,
            )
        )
    return communicator.allgather(np.concatenate(mine), "sample.tokens")


FOLDER = "samples"  # in a run folder
SHOWN_MASKS = 4  # samples, if log.samples is not set
COLUMNS = 16  # images side by side
STOP_CHECK_TOKENS = 64  # between two checks whether to stop: each costs one small allreduce


_PNG = b"\x89PNG"


class _Stopped(Exception):
    """Raised if the job stops while sampling, on every rank at the same position."""


@dataclass
class SampleSeries:
    """Writes log.samples samples of the model at each evaluation: generated sequences, or masks. By
    default a few masks at the end.

    The random numbers of a sequence depend only on the seed and are independent of training. It
    begins with the first token of the validation set: for images, the start token.
    """

    config: Config
    task: Task
    val: Source
    communicator: Communicator
    learner: Learner
    heartbeat: Heartbeat
    health: HealthMonitor
    log: Log
    run: Path | None
    open_run: OpenFolder

    def draw(self, now: TrainState) -> None:
        """Samples from the current weights, and writes a file on rank 0. A collective. Raises
        UserError if the model cannot generate samples."""
        if self.config.log.samples:
            self._draw(self.config.log.samples, now)

    def draw_at_end(self, now: TrainState) -> None:
        """Writes the default samples if log.samples is not set, as draw() does."""
        if (
            self.config.log.samples is None
            and self._kind != "step"
            and maps() is not None
            and not self.config.parallel.has_stages
        ):
            self._draw(SHOWN_MASKS, now)

    def _draw(self, samples: int, now: TrainState) -> None:
        if self.run is None:
            return
        began_s = time.perf_counter()
        stem = self._kind
        if stem != "step":
            samples = min(samples, len(self.val))
        content: bytes | None
        with self.learner.averaged():
            if stem == "step":
                content = self._sequences(samples, now)
            else:
                content = png(self._predicted(samples, now))
        if content is not None and self.communicator.rank == 0:
            suffix = "png" if content.startswith(_PNG) else "txt"
            self._write(f"{stem}-{now.progress.step:08d}.{suffix}", content)
            self.log.emit(
                "samples",
                now.progress.step,
                count=samples,
                draw_s=round(time.perf_counter() - began_s, 3),
            )

    @property
    def _kind(self) -> str:
        """What is shown: "masks", "maps" or, of a step, generated sequences."""
        if self.task.mask_label is not None:
            return "masks"
        return "maps" if self.task.map_names else "step"

    def _predicted(self, samples: int, now: TrainState) -> np.ndarray:
        """Returns a picture of samples spread over the validation set, with their predictions."""
        pictures = maps_module("pictures", self.config.where("log.samples"))
        self.heartbeat.beat(f"{self._kind} for the report", now.progress.epoch, now.progress.step)
        numbers = np.unique(np.linspace(0, len(self.val) - 1, samples).astype(np.int64))
        picture: np.ndarray = pictures.picture(
            self.config, self.task, self.val, self.learner, numbers, self.heartbeat
        )
        return picture

    def _sequences(self, samples: int, now: TrainState) -> bytes | None:
        """Returns the file's content, a picture or a text; None if the job stops meanwhile."""
        tokens = self.task.drawn
        if not isinstance(self.learner, Sampler) or tokens is None:
            what = (
                f"log.samples={samples} draws tokens or masks, and the job has "
                f"task.name={self.task.name}"
            )
            raise UserError(
                what,
                self.config.where("log.samples"),
                "task.name=language or segmentation, or leave it out",
            )
        pictures = self.val.pictures
        positions = tokens.shape[0]
        try:
            drawn = draw_on_all_ranks(
                self.learner.data,  # the ranks of a tensor group sample the same sequences together
                self.learner,
                np.tile(self.val.read(np.zeros(1, np.int64))["tokens"][:, :1], (samples, 1)),
                positions,
                tokens=tokens.values if pictures is None else pictures.values,
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
        from hvdtrain.data.datasets.text import decode
        from hvdtrain.data.tokenizer import read_tokenizer

        path: Any = self.config.data.options.get("tokenizer")
        tokenizer = read_tokenizer(expand(path, "data.tokenizer")) if path else None
        return (
            "\n".join(
                f"--- {number}\n{decode(tokens, tokenizer)}"
                for number, tokens in enumerate(drawn, start=1)
            )
            + "\n"
        )

    def _write(self, name: str, content: bytes) -> None:
        """Writes a file. If that fails, a warning is printed and the job continues."""
        assert self.run is not None
        try:
            with self.open_run(self.run) as run, run.make_folder(FOLDER) as folder:
                folder.replace(name, content)
        except OSError as error:
            warn(f"no samples of this step: {self.run / FOLDER / name}: {error.strerror or error}")


_GAP = 2  # pixels between two images, after they were enlarged
_SMALLEST = 64  # pixels of an image's height in the grid


def grid(images: np.ndarray, columns: int | None = None) -> np.ndarray:
    """Arranges images uint8 (n, H, W, C) in a grid uint8 (rows, columns, C), enlarged by an integer
    factor, on white.

    columns: images side by side; None: as many as make the page about as high as wide.
    """
    n, height, width, channels = images.shape
    factor = max(1, -(-_SMALLEST // height))
    images = images.repeat(factor, 1).repeat(factor, 2)
    height = height * factor
    width = width * factor
    columns = min(n, columns or max(1, round(math.sqrt(n * height / width))))
    rows = -(-n // columns)
    page = np.full(
        (rows * (height + _GAP) - _GAP, columns * (width + _GAP) - _GAP, channels), 255, np.uint8
    )
    for number, image in enumerate(images):
        row, column = divmod(number, columns)
        top = row * (height + _GAP)
        left = column * (width + _GAP)
        page[top : top + height, left : left + width] = image
    return page


def png(page: np.ndarray) -> bytes:
    """Returns a PNG file of uint8 (H, W, C), with one channel or three."""
    import PIL.Image

    out = io.BytesIO()
    PIL.Image.fromarray(page[..., 0] if page.shape[2] == 1 else page).save(out, "PNG")
    return out.getvalue()
