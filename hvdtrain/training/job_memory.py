"""The memory of a job whose ranks are connected: its forecast, batch.micro=auto, and what would have fitted where it runs out."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import traceback
from collections.abc import Callable, Iterator

from hvdtrain.comm.communicator import Communicator
from hvdtrain.comm.rank_0 import on_rank_0
from hvdtrain.config.read import read_run_config, resolve
from hvdtrain.config.schema import Config
from hvdtrain.errors import MEMORY, UserError, exit_code_of
from hvdtrain.training.build import build_recipe
from hvdtrain.training.checkpoint.resume import former_run
from hvdtrain.training.datasets import Datasets
from hvdtrain.training.input.prefetch import read_ahead_of
from hvdtrain.training.memory.advice import advice
from hvdtrain.training.memory.forecast import MARGIN, MemoryForecast, forecast_memory, gib
from hvdtrain.training.memory.largest_micro import largest_micro
from hvdtrain.training.memory.room import Room, room_of_rank
from hvdtrain.training.system_limits import limit_reached


def forecast_of_job(config: Config, datasets: Datasets, communicator: Communicator) -> MemoryForecast:
    """The forecast of a job whose ranks are connected."""
    ranks, samples = communicator.size, len(datasets.train)
    ahead = read_ahead_of(config.data, datasets.train, communicator.local_size).steps
    recipe = build_recipe(config, samples, datasets.task.sizes.get("context"))
    return forecast_memory(config, datasets.task, recipe, ranks, communicator.features, samples, -(-len(datasets.val) // ranks), ahead)


def resolve_micro(config: Config, datasets: Datasets, communicator: Communicator) -> Config:
    """The configuration with a number for batch.micro=auto. Every rank calls it.

    The run folder keeps that number, so that a resumed job computes as an uninterrupted one. Raises UserError on all ranks, with the exit
    code of missing memory, where not even one sample fits.
    """
    if config.batch.micro != "auto":
        return config
    least = min(communicator.allgather_object(room_of_rank(config, communicator)))
    forecast = forecast_of_job(config, datasets, communicator)

    def choose() -> tuple[int, str]:
        former = _of_former_run(config)
        if former is not None:
            return former, "auto: as this run began"
        micro = largest_micro(lambda samples: MARGIN * forecast.footprint(micro=samples).total, forecast.share, least.bytes)
        if not micro:
            raise _nothing_fits(config, forecast, advice(forecast, least))
        return micro, f"auto: {gib(forecast.footprint(micro=micro).total)} of {gib(least.bytes)} ({least.limit})"

    micro, why = on_rank_0(communicator, choose)
    return config.replace(batch=config.batch.replace(micro=micro)).with_provenance({"batch.micro": why})


def _of_former_run(config: Config) -> int | None:
    """What the run to go on with was trained with; None for a new job."""
    run = former_run(config)
    if run is None:
        return None
    try:
        micro = resolve(list(read_run_config(run))).batch.micro
    except UserError:
        return None
    return micro if isinstance(micro, int) else None


def _nothing_fits(config: Config, forecast: MemoryForecast, what: str) -> UserError:
    error = UserError(f"one sample does not fit: {what}", config.where("batch.micro"), "a smaller model, more ranks with shard.stage=2")
    error.code = MEMORY
    return error


@contextlib.contextmanager
def advised(forecast: Callable[[], MemoryForecast], room: Room) -> Iterator[None]:
    """An error inside that ends a job for want of memory tells what would have fitted; `room`: what this rank had before the job."""
    try:
        yield
    except Exception as error:
        if exit_code_of(limit_reached(error) or error) == MEMORY:
            _forget_arrays(error)
            with contextlib.suppress(Exception):  # there may be no memory for this either
                error.add_note(f"hvdtrain: {advice(forecast(), room)}")
        raise


def _forget_arrays(error: BaseException) -> None:
    """Drops the arrays of the functions that the error came through: a prediction needs some memory itself."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__  # type: ignore[assignment]
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # stacks of threads and Python's objects come from the system
    if trim is not None:
        trim(0)
