"""Predicts the memory of a job's rank, finds the memory that a rank may use on its host, and
suggests changes if the job does not fit."""

from __future__ import annotations

import contextlib
import itertools
import re
import resource
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from hvdtrain.comm.communicator import Communicator
from hvdtrain.comm.engines import Feature
from hvdtrain.config import plugins
from hvdtrain.config.schema import Config
from hvdtrain.data.sampler import largest_share
from hvdtrain.errors import UserError
from hvdtrain.frameworks.footprint import Footprint, PlannedStep
from hvdtrain.recipe.recipe import Recipe
from hvdtrain.tasks.task import Task
from hvdtrain.training.input import passes_of_step

# times the prediction, for the allocator and the libraries (docs/memory.md)
MARGIN = 1.1


@dataclass(frozen=True)
class MemoryForecast:
    """Predicts the footprint of the rank that needs most, for the configured job and with some keys
    changed."""

    config: Config
    task: Task
    ranks: int
    features: frozenset[Feature]  # of the engine
    share: int  # most samples of a rank in a step
    passes: int  # passes of that step, if batch.micro is not set
    evaluated: int  # samples in one pass of an evaluation
    ahead: int  # steps that are prefetched
    # by step, stage, recompute
    _known: dict[tuple[PlannedStep, int, int | str], Footprint] = field(default_factory=dict)

    def footprint(
        self, *, micro: int | None = None, stage: int | None = None, recompute: str | None = None
    ) -> Footprint:
        """Returns the footprint with these values of batch.micro, shard.stage and model.recompute.
        The first call takes about a second.

        Raises UserError if the framework or the model cannot be predicted, or if the model has no
        blocks to recompute.
        """
        config = self.config
        step = self.step(micro)
        key = (
            step,
            config.shard.stage if stage is None else stage,
            config.model.recompute if recompute is None else recompute,
        )
        if key not in self._known:
            self._known[key] = self._predict(
                config.replace(
                    shard=config.shard.replace(stage=key[1]),
                    model=config.model.replace(recompute=key[2]),
                ),
                step,
            )
        return self._known[key]

    def _predict(self, config: Config, step: PlannedStep) -> Footprint:
        framework: Any = plugins.load("frameworks", config.framework, config.where("framework"))
        if not hasattr(framework, "footprint"):
            what = f"the memory of framework={config.framework} cannot be predicted"
            raise UserError(what, config.where("framework"), "framework=torch")
        footprint: Footprint = framework.footprint(
            config, self.task, step, self.ranks, self.features
        )
        return footprint

    def step(self, micro: int | None = None) -> PlannedStep:
        """Returns the step with at most `micro` samples in a pass; None: as configured."""
        micro = micro or (
            self.config.batch.micro if isinstance(self.config.batch.micro, int) else None
        )
        passes = -(-self.share // micro) if micro else self.passes
        return PlannedStep(self.share, passes, self.evaluated, self.ahead, writes_checkpoints=True)


def forecast_memory(
    config: Config,
    task: Task,
    recipe: Recipe,
    ranks: int,
    features: frozenset[Feature],
    samples: int,
    evaluated: int,
    ahead: int,
) -> MemoryForecast:
    """Returns the forecast of the step with the largest batch of the recipe, over `samples`
    training samples."""
    batch = max(recipe.batch.first, *recipe.batch.to, 1)
    share = largest_share(0, batch, max(1, config.readers(ranks)), samples, config.data.sampling)
    micro = config.batch.replace(micro=None) if config.batch.micro == "auto" else config.batch
    passes = passes_of_step(config.replace(batch=micro), share, batch, recipe.batch.first)
    return MemoryForecast(
        config,
        task,
        ranks,
        features,
        share,
        passes,
        max(1, min(evaluated, config.batch.evaluate)),
        ahead,
    )


def gib(size: float) -> str:
    """Formats bytes: 6.1 GiB, 0.35 GiB, 12 MiB."""
    if size >= 2**30 / 10:
        return f"{size / 2**30:.{1 if size >= 2**30 else 2}f} GiB"
    return f"{size / 2**20:,.0f} MiB"


_MOST_GUESSES = 20  # after the first two


def largest_micro(size: Callable[[int], float], most: int, room: float) -> int:
    """Returns the largest number of samples, up to `most`, that fits; 0 if one sample does not fit.
    size() returns the bytes for a number of samples.

    Memory is convex in the number of samples, so linear interpolation between two sizes gives a
    number that fits. If the line is nearly flat, bisection is faster.
    """
    above = size(most)
    if above <= room:
        return most
    fits = 1
    below = size(1) if most > 1 else above
    if below > room:
        return 0
    for number in range(_MOST_GUESSES):
        if most - fits == 1:
            break
        by_line = fits + max(1, int((room - below) / (above - below) * (most - fits)))
        guess = by_line if number % 2 == 0 and by_line < most else (fits + most) // 2
        found = size(guess)
        if found <= room:
            fits = guess
            below = found
        else:
            most = guess
            above = found
    return fits


_V2 = ("memory.max", "memory.current")
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes")
_UNLIMITED = 2**60  # control groups of version 1 report more if there is no limit


class Room(NamedTuple):
    """The memory that a rank may use, by the tightest limit."""

    bytes: int
    # for people: "ulimit -v", "ulimit -d", "the container's memory.max", "free memory of the host"
    limit: str


def room_of_rank(config: Config, communicator: Communicator) -> Room:
    """Returns the memory available on this rank's GPU, or on its host."""
    framework: Any = plugins.load("frameworks", config.framework, config.where("framework"))
    free = (
        framework.free_device_bytes(config, communicator)
        if hasattr(framework, "free_device_bytes")
        else None
    )
    return (
        room(communicator.local_size) if free is None else Room(free, "the free memory of the GPU")
    )


def room(
    local_size: int, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")
) -> Room:
    """Returns the memory available to one of `local_size` ranks on the host, beyond what this
    process already uses; infinite if no limit can be read."""
    return min(
        [*_limits(proc), *_container(local_size, proc, cgroups), *_free(local_size, proc)],
        default=Room(_UNLIMITED, "no limit"),
    )


def _limits(proc: Path) -> Iterator[Room]:
    """Yields limits of this process's address space and of its private writable memory."""
    for which, entry, name in (
        (resource.RLIMIT_AS, "VmSize", "ulimit -v"),
        (resource.RLIMIT_DATA, "VmData", "ulimit -d"),
    ):
        soft, _ = resource.getrlimit(which)
        size = _number(proc / "self" / "status", rf"^{entry}:\s*(\d+) kB$")
        if soft != resource.RLIM_INFINITY and size is not None:
            yield Room(max(0, soft - 1024 * size), name)


def _container(local_size: int, proc: Path, cgroups: Path) -> Iterator[Room]:
    """Yields limits of this process's control group and its parents, in versions 2 and 1; a
    container sees its own group as the root."""
    for line in _text(proc / "self" / "cgroup").splitlines():
        _, _, named = line.partition(":")
        controllers, _, path = named.partition(":")
        if controllers not in ("", "memory"):
            continue
        root, (limit_name, used_name) = (cgroups / "memory", _V1) if controllers else (cgroups, _V2)
        folder = root / path.lstrip("/")
        for group in (folder, *folder.parents):
            limit = _number(group / limit_name, r"^(\d+)$")
            used = _number(group / used_name, r"^(\d+)$")
            if limit is not None and used is not None and limit < _UNLIMITED:
                # given back when it is needed
                cached = _number(group / "memory.stat", r"^(?:total_)?inactive_file (\d+)$") or 0
                yield Room(
                    max(0, limit - used + cached) // local_size, f"the container's {limit_name}"
                )
            if group == root:
                break


def _free(local_size: int, proc: Path) -> Iterator[Room]:
    free = _number(proc / "meminfo", r"^MemAvailable:\s*(\d+) kB$")
    if free is not None:
        yield Room(1024 * free // local_size, "the free memory of the host")


def _number(path: Path, pattern: str) -> int | None:
    found = re.search(pattern, _text(path), re.MULTILINE)
    return int(found[1]) if found else None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def stages_of(config: Config) -> tuple[int, ...]:
    """Returns the values of shard.stage that the configuration's parallelism supports."""
    return tuple(range(config.parallel.highest_stage + 1))


def advice(forecast: MemoryForecast, room: Room) -> str:
    """Returns advice: the job takes 6.1 GiB of each rank, which had 4.0 (ulimit -v); shard.stage=2
    takes 3.1 GiB, batch.micro=8 3.9 GiB.

    Raises UserError if the job cannot be predicted.
    """
    config = forecast.config
    most = max(stages_of(config))
    higher = (
        range(max(2, config.shard.stage + 1), most + 1)
        if forecast.ranks > config.parallel.ranks
        else ()
    )
    stages: list[int | None] = [None, *higher]
    recomputes = (
        [None, "all"]
        if config.model.recompute == "none" and config.parallel.may_recompute
        else [None]
    )
    needs = forecast.footprint().total
    parts = [
        f"the job takes {gib(needs)} of each rank by prediction, which had {gib(room.bytes)} "
        f"({room.limit})"
    ]
    for stage, recompute in list(itertools.product(stages, recomputes))[1:]:
        words = f"shard.stage={stage} " * (stage is not None) + f"model.recompute={recompute}" * (
            recompute is not None
        )
        with contextlib.suppress(UserError):  # a model without blocks
            parts.append(
                f"{words.rstrip()} takes "
                f"{gib(forecast.footprint(stage=stage, recompute=recompute).total)}"
            )
    step = forecast.step()
    micro = largest_micro(
        lambda samples: MARGIN * forecast.footprint(micro=samples).total, step.micro, room.bytes
    )
    if 0 < micro < step.micro and config.parallel.may_divide_passes:
        parts.append(f"batch.micro={micro} takes {gib(forecast.footprint(micro=micro).total)}")
    found = forecast.footprint()
    if found.evaluation == found.tensors and forecast.evaluated > 1:
        parts.append(
            f"the evaluation takes most: batch.evaluate={max(1, forecast.evaluated // 4)} takes "
            "less"
        )
    return "; ".join(parts)
