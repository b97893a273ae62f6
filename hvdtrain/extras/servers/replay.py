"""hvdtrain replay: recomputes the weights of an asynchronous job in one process, and compares them
with its newest checkpoint."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from itertools import accumulate, repeat
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.comm.communicator import SingleProcessCommunicator
from hvdtrain.comm.launcher_variables import placement
from hvdtrain.config import plugins
from hvdtrain.config.read import ACTS, CODE, expand
from hvdtrain.config.schema import Config
from hvdtrain.core.arrays import Arrays
from hvdtrain.core.extras import shows_run
from hvdtrain.core.process import command_line, path_argument
from hvdtrain.core.progress import Progress
from hvdtrain.data.configured.unwritten import unstaged
from hvdtrain.errors import DIVERGED, DONE, UserError
from hvdtrain.extras.servers.keys import ServersConfig
from hvdtrain.extras.servers.update_log import NAME, read_updates
from hvdtrain.features.every_feature import configure
from hvdtrain.records.run import read_run
from hvdtrain.training.checkpoint.files import Checkpoint
from hvdtrain.training.checkpoint.resume import check_identity, newest_good
from hvdtrain.training.data_facts import identity
from hvdtrain.training.datasets import Datasets, open_datasets, recipe_of
from hvdtrain.training.input import Prefetcher
from hvdtrain.training.start import begin

USAGE = """\
hvdtrain replay RUN [key=value ...]
  RUN        the run folder of a job with servers.log=true
  key=value  what RUN alone may not say, such as the name of your own code: model.name=mine:Net
makes the updates of RUN/updates.bin again, one after the other in one process, each from a gradient at the weights that its worker had,
and compares weights and optimizer state with the newest checkpoint, bit by bit. Exit code 0: they are the same; 82: they differ"""  # noqa: E501
_MOST_BYTES = 2**40


def replay(arguments: Sequence[str]) -> int:
    """Runs `replay`; returns the exit code. Raises UserError."""
    if not arguments or {"-h", "--help"} & set(arguments):
        print(USAGE)
        return DONE
    others = [word for word in arguments[1:] if word.partition("=")[0] not in (*CODE, *ACTS)]
    if others or arguments[0].startswith("-") or "=" in arguments[0]:
        raise UserError(
            f"one RUN is needed, not {' '.join(others or arguments)}",
            "command line of replay",
            USAGE.partition("\n")[0],
        )
    if placement(os.environ).size > 1:
        raise UserError(
            "replay runs in one process", "command line of replay", "start it without a launcher"
        )
    run = expand(arguments[0], "RUN")
    config = unstaged(_config_of(run, arguments[1:]))
    header, updates = read_updates(run)
    if header.first:
        what = f"the log begins at step {header.first}, but a replay begins at step 0"
        raise UserError(what, str(run), "a run that had servers.log=true from its beginning")
    servers = ServersConfig.of(config).count
    if servers != header.servers:
        what = (
            f"the log was written by {header.servers} servers, but config.yaml has {servers}: the "
            "job was resumed with another number"
        )
        raise UserError(what, str(run), "a run that always had the same servers")
    found, arrays, notes = newest_good(run, _MOST_BYTES)
    for note in notes:
        print(note)
    step = found.train_state.progress.step
    if step > len(updates):
        what = f"the newest checkpoint is of step {step}, but the log has {len(updates)} updates"
        raise UserError(what, str(run), "a run that always had servers.log=true")
    if not step:
        raise UserError(
            "the newest checkpoint is of step 0, so there is no update to repeat",
            str(run),
            "a run that has trained",
        )
    used = updates[:step]
    if sorted(update.ticket for update in used) != list(range(step)):
        what = (
            f"the first {step} updates of the log are not those of the first {step} tickets: the "
            "log is damaged"
        )
        raise UserError(what, str(run / NAME), "another copy of it, if there is one")
    _print_changes(run)
    return compare(run, arrays, _replay(config, found, used, header.threads), step)


def _print_changes(run: Path) -> None:
    """Prints keys that changed on a resume, which may explain differences."""
    try:
        starts = read_run(run).events_of("start")
    except UserError:
        return
    for start in starts:
        changed = start.get("changed")
        for key in changed if isinstance(changed, dict) else ():
            print(
                f"{key} was changed at step {start['step']}: the replay has the value of "
                "config.yaml from the beginning"
            )


def _config_of(run: Path, arguments: Sequence[str]) -> Config:
    """Returns the configuration of the run. Raises UserError if it cannot be read, and if only the
    run names code."""
    config = configure(None, [f"resume={run}", *arguments])
    plugins.check_names(config)
    return config.replace(resume="auto")


def _replay(config: Config, found: Checkpoint, updates: Sequence[Any], threads: int) -> Arrays:
    from hvdtrain.extras.servers import replayed  # torch

    datasets = open_datasets(config)
    check_identity(found, identity(config, datasets))
    recipe = recipe_of(config, datasets)
    first = begin(config, datasets).progress
    steps: list[Progress] = list(
        accumulate(
            repeat(None, len(updates) - 1),
            lambda p, _: p.advance(recipe.at(p).batch),
            initial=first,
        )
    )
    readers: dict[int, Prefetcher] = {}

    def input_of(learner: Any, p: Progress) -> Any:
        if id(learner) not in readers:
            readers[id(learner)] = _reader(config, datasets, learner)
        return readers[id(learner)].prepare(p)

    began_s = time.perf_counter()
    arrays = replayed.replay(config, datasets.task, updates, steps, input_of, threads)
    print(f"replayed {len(updates)} updates in {time.perf_counter() - began_s:.1f} s")
    return arrays


def _reader(config: Config, datasets: Datasets, learner: Any) -> Prefetcher:
    recipe = recipe_of(config, datasets)
    return Prefetcher(
        config, SingleProcessCommunicator(), recipe, datasets.train, learner, datasets.draws
    )


def compare(run: Path, arrays: Arrays, replayed: Arrays, step: int) -> int:
    """Compares the arrays; returns the exit code. Skips buffers, because running statistics of
    norms are means over workers, and no weight depends on them."""
    compared = [name for name in arrays if not name.startswith("b.")]
    if buffers := len(arrays) - len(compared):
        print(
            f"not compared: {buffers} buffers; running statistics of norms are means over "
            "workers, which the log does not have"
        )
    different = [
        name
        for name in compared
        if not np.array_equal(arrays[name], replayed[name], equal_nan=True)
    ]
    if not different:
        print(
            f"the {len(compared)} arrays of weights and optimizer state of step {step} are the "
            "same, bit by bit"
        )
        return DONE
    gap = max(float(np.abs(arrays[name] - replayed[name]).max()) for name in different)
    print(
        f"{len(different)} of {len(compared)} arrays of step {step} differ, by {gap:.3g} at most, "
        f"the first is {different[0]}:"
    )
    print(
        "another processor, another version of torch, changed keys, or a model that draws random "
        "numbers of its own"
    )
    for name in shows_run():
        print(f"{name:8} {command_line(name, path_argument(run))}")
    return DIVERGED
