"""Files of samples for the report: what a model generates, or masks that it predicts, computed by
all ranks together."""

from __future__ import annotations

import functools
import io
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.comm.communicator import Communicator
from hvdtrain.config.schema import Config
from hvdtrain.core.extras import implementing_module, maps, maps_module
from hvdtrain.data.source import Source
from hvdtrain.events.log import Log
from hvdtrain.events.terminal import warn
from hvdtrain.frameworks.learner import Learner
from hvdtrain.tasks.task import Task
from hvdtrain.training.checkpoint.files import OpenFolder
from hvdtrain.training.health.heartbeat import Heartbeat
from hvdtrain.training.health.monitor import HealthMonitor
from hvdtrain.training.progress.train_state import TrainState

FOLDER = "samples"  # in a run folder
SHOWN_MASKS = 4  # samples, if log.samples is not set
_PNG = b"\x89PNG"


@dataclass
class SampleSeries:
    """Writes log.samples samples of the model at each evaluation: generated sequences, or masks. By
    default a few masks at the end."""

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
                content = self._sequences.draw(samples, now)
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

    @functools.cached_property
    def _sequences(self) -> Any:
        """The sequences that the model generates, of the extra for log.samples."""
        return implementing_module("log.samples").sequences_of(
            self.config, self.task, self.val, self.learner, self.heartbeat, self.health
        )

    def _predicted(self, samples: int, now: TrainState) -> np.ndarray:
        """Returns a picture of samples spread over the validation set, with their predictions."""
        pictures = maps_module("pictures", self.config.where("log.samples"))
        self.heartbeat.beat(f"{self._kind} for the report", now.progress.epoch, now.progress.step)
        numbers = np.unique(np.linspace(0, len(self.val) - 1, samples).astype(np.int64))
        picture: np.ndarray = pictures.picture(
            self.config, self.task, self.val, self.learner, numbers, self.heartbeat
        )
        return picture

    def _write(self, name: str, content: bytes) -> None:
        """Writes a file. If that fails, a warning is printed and the job continues."""
        assert self.run is not None
        try:
            with self.open_run(self.run) as run, run.make_folder(FOLDER) as folder:
                folder.replace(name, content)
        except OSError as error:
            warn(f"no samples of this step: {self.run / FOLDER / name}: {error.strerror or error}")


def png(page: np.ndarray) -> bytes:
    """Returns a PNG file of uint8 (H, W, C), with one channel or three."""
    import PIL.Image

    out = io.BytesIO()
    PIL.Image.fromarray(page[..., 0] if page.shape[2] == 1 else page).save(out, "PNG")
    return out.getvalue()
