"""The memory of a job whose ranks are connected: its forecast, batch.micro=auto, measurements, and
advice if it runs out."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import re
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hvdtrain.comm.communicator import Communicator
from hvdtrain.comm.on_all_ranks import on_rank_0
from hvdtrain.config.read import read_run_config, resolve
from hvdtrain.config.schema import Config
from hvdtrain.errors import MEMORY, UserError, exit_code_of
from hvdtrain.frameworks.footprint import Footprint
from hvdtrain.frameworks.learner import Learner
from hvdtrain.recipe.recipe import Recipe
from hvdtrain.training.checkpoint.resume import former_run
from hvdtrain.training.datasets import Datasets, recipe_of
from hvdtrain.training.failure import limit_reached
from hvdtrain.training.input import read_ahead_of, sharers_of_cores
from hvdtrain.training.memory import (
    MARGIN,
    MemoryForecast,
    Room,
    advice,
    forecast_memory,
    gib,
    largest_micro,
    room_of_rank,
)
from hvdtrain.training.telemetry.telemetry import peak_memory_bytes


def forecast_of_job(
    config: Config, datasets: Datasets, communicator: Communicator, recipe: Recipe | None = None
) -> MemoryForecast:
    """Returns the forecast of a job whose ranks are connected; recipe: if already computed."""
    ranks = communicator.size
    samples = len(datasets.train)
    ahead = read_ahead_of(config.data, datasets.train, sharers_of_cores(config, communicator)).steps
    recipe = recipe or recipe_of(config, datasets)
    return forecast_memory(
        config,
        datasets.task,
        recipe,
        ranks,
        communicator.features,
        samples,
        -(-len(datasets.val) // ranks),
        ahead,
    )


def resolve_micro(config: Config, datasets: Datasets, communicator: Communicator) -> Config:
    """Returns the configuration with a number for batch.micro=auto. Every rank calls it.

    The run folder records the number, so that a resumed job gives the same results as an
    uninterrupted one. Raises UserError on all ranks, with the exit code for missing memory, if not
    even one sample fits.
    """
    if config.batch.micro != "auto":
        return config
    least = min(communicator.allgather_object(room_of_rank(config, communicator)))
    forecast = forecast_of_job(config, datasets, communicator)

    def choose() -> tuple[int, str]:
        former = _of_former_run(config)
        if former is not None:
            return former, "auto: as this run began"
        micro = largest_micro(
            lambda samples: MARGIN * forecast.footprint(micro=samples).total,
            forecast.share,
            least.bytes,
        )
        if not micro:
            raise _nothing_fits(config, forecast, advice(forecast, least))
        return (
            micro,
            f"auto: {gib(forecast.footprint(micro=micro).total)} of {gib(least.bytes)} "
            f"({least.limit})",
        )

    micro, why = on_rank_0(communicator, choose)
    return config.replace(batch=config.batch.replace(micro=micro)).with_provenance(
        {"batch.micro": why}
    )


def _of_former_run(config: Config) -> int | None:
    """Returns the value that the resumed run was trained with; None for a new job."""
    run = former_run(config)
    if run is None:
        return None
    try:
        micro = resolve(list(read_run_config(run))).batch.micro
    except UserError:
        return None
    return micro if isinstance(micro, int) else None


def _nothing_fits(config: Config, forecast: MemoryForecast, what: str) -> UserError:
    error = UserError(
        f"one sample does not fit: {what}",
        config.where("batch.micro"),
        "a smaller model, more ranks with shard.stage=2",
    )
    error.code = MEMORY
    return error


@contextlib.contextmanager
def advised(forecast: Callable[[], MemoryForecast], room: Room) -> Iterator[None]:
    """Adds advice on what would fit to an out-of-memory error. room: the memory that this rank had
    before the job."""
    try:
        yield
    except Exception as error:
        if exit_code_of(limit_reached(error) or error) == MEMORY:
            _forget_arrays(error)
            with contextlib.suppress(Exception):  # there may be no memory for this either
                error.add_note(f"hvdtrain: {advice(forecast(), room)}")
        raise


def _forget_arrays(error: BaseException) -> None:
    """Drops the arrays in the error's stack frames: a prediction needs some memory itself."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__  # type: ignore[assignment]
    gc.collect()
    # stacks of threads and Python objects are allocated from the system
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


# a job with fewer weights is not predicted, which would take a second and 80 MB of libraries
LEAST_WEIGHTS = 2**20


class MemoryMeter:
    """Measures the memory of one rank. Create it before the model; call begin() before the first
    step and end() after the last one."""

    def __init__(self, forecast: MemoryForecast, room: Room) -> None:
        self._forecast = forecast
        self._room = room
        self._base_bytes = resident_bytes()  # the interpreter, the libraries and the data set
        self._private_base_bytes = self._base_bytes - shared_bytes()
        self.predicted: Footprint | None = None  # on rank 0
        self.note = ""  # for the header: the prediction, or why there is none
        self.warning = ""

    def begin(self, learner: Learner, weights: int, rank: int) -> None:
        """Called once the model is loaded. weights: the number of trained numbers. Rank 0 makes a
        prediction unless the model is small."""
        if rank == 0 and weights >= LEAST_WEIGHTS:
            before = resident_bytes()
            private = resident_bytes() - shared_bytes()
            self._predict(on_gpu=learner.gpu() is not None)
            self._base_bytes += max(0, resident_bytes() - before)  # memory of the prediction itself
            self._private_base_bytes += max(0, resident_bytes() - shared_bytes() - private)
        forget_peak()

    def _predict(self, on_gpu: bool) -> None:
        try:
            self.predicted = self._forecast.footprint()
            needs = _needs(self.predicted, on_gpu)
            self.note = (
                f"{gib(needs)} of each rank by prediction, {gib(self._room.bytes)} is there "
                f"({self._room.limit})"
            )
            if MARGIN * needs > self._room.bytes:
                self.warning = f"memory may not be enough: {advice(self._forecast, self._room)}"
        except UserError as error:
            self.note = f"not predicted: {error.what}"

    def end(self, learner: Learner, communicator: Communicator) -> dict[str, Any]:
        """Returns fields of the events "end" and "stop". A collective."""
        gpu = learner.gpu()
        own = (
            gpu.peak_bytes()
            if gpu
            else max(0, peak_memory_bytes() - shared_bytes() - self._private_base_bytes)
        )
        peaks, bases = zip(*communicator.allgather_object((own, self._base_bytes)), strict=True)
        fields = {
            "rank_memory_mb": [round(peak / 1e6, 3) for peak in peaks],
            "memory_base_mb": round(max(bases) / 1e6, 3),
        }
        if self.predicted is not None:
            fields["memory_predicted_mb"] = round(_needs(self.predicted, gpu is not None) / 1e6, 3)
        return fields


def line(fields: dict[str, Any]) -> str:
    """Formats the result: memory 1.95 GiB at most on a rank, 1.90 GiB predicted (+2.6 %), beside
    0.31 GiB of libraries and data."""
    measured = 1e6 * fields["rank_memory_mb"][0]
    predicted = 1e6 * fields.get("memory_predicted_mb", 0.0)
    most = 1e6 * max(fields["rank_memory_mb"])
    beside = f"beside {gib(1e6 * fields['memory_base_mb'])} of libraries and data"
    if not predicted:
        return f"memory   {gib(most)} at most on a rank, {beside}"
    return (
        f"memory   {gib(most)} at most on a rank, {gib(predicted)} predicted "
        f"({measured / predicted - 1:+.1%} on rank 0), {beside}"
    )


def _needs(predicted: Footprint, on_gpu: bool) -> int:
    """Returns the bytes that count: a GPU does not hold the copies for checkpoints and lost
    ranks."""
    return predicted.total - (predicted.checkpoint + predicted.copies) * on_gpu


def resident_bytes() -> int:
    """Returns the resident bytes of this process now; 0 if the system does not report them."""
    found = re.search(r"^VmRSS:\s*(\d+) kB$", _status(), re.MULTILINE)
    return 1024 * int(found[1]) if found else 0


def shared_bytes() -> int:
    """Resident bytes of files and of memory shared with other ranks: libraries are loaded as they
    are used, and can be evicted."""
    return sum(
        1024 * int(size)
        for size in re.findall(r"^Rss(?:File|Shmem):\s*(\d+) kB$", _status(), re.MULTILINE)
    )


def forget_peak() -> None:
    """Resets peak_memory_bytes(), if the system allows that."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _status() -> str:
    try:
        return Path("/proc/self/status").read_text()
    except OSError:
        return ""
