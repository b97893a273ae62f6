"""What a job checks before it reads its data, which may take long: the user's code, libraries,
files and the device that its configuration names."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hvdtrain.comm.communicator import Communicator
from hvdtrain.comm.on_all_ranks import on_rank_0
from hvdtrain.config import plugins
from hvdtrain.config.schema import Config
from hvdtrain.config.sections.section import is_object
from hvdtrain.recipe.from_config import users_function
from hvdtrain.training.checkpoint.room import cannot_write
from hvdtrain.training.health.heartbeat import Heartbeat


def check_before_data(config: Config, communicator: Communicator, heartbeat: Heartbeat) -> None:
    """Raises UserError if the device does not exist, if a module, class or file that the
    configuration names does not, or if the run folder cannot be created. Every rank calls it."""
    on_rank_0(communicator, lambda: _check_files(config))
    heartbeat.beat(f"importing {config.framework}", 0, 0)
    framework: Any = plugins.load("frameworks", config.framework, config.where("framework"))
    # JAX, and Keras on it, must be started before the user's code imports them, in build()
    if not hasattr(framework, "check_device"):
        return
    framework.check_device(config, communicator)
    for package in _import_code(config):
        heartbeat.beat(f"importing {package}", 0, 0)


def _check_files(config: Config) -> None:
    """Checks what rank 0 reads and writes."""
    if config.model.weights is not None:
        from hvdtrain.training.pretrained import check_weights

        check_weights(config)
    where = config.where("log.trackers")
    for name in dict.fromkeys(config.log.trackers):
        plugins.load("events/trackers", name, where).check_installed()
    resumed = None if config.resume in ("auto", "no") else config.resume
    key = "resume" if config.run is None and resumed else "run"
    run = Path(config.run or resumed or "runs").expanduser().absolute()
    above = next(folder for folder in (run, *run.parents) if folder.exists())
    if not (above.is_dir() and os.access(above, os.W_OK)):
        raise cannot_write(_why_not(above), config.where(key))


def _why_not(folder: Path) -> OSError:
    """Returns the error of a file made in a folder that cannot be written."""
    if not folder.is_dir():
        code = errno.ENOTDIR
    elif os.statvfs(folder).f_flag & os.ST_RDONLY:
        code = errno.EROFS
    else:
        code = errno.EACCES
    return OSError(code, os.strerror(code), str(folder))


def _import_code(config: Config) -> Iterator[str]:
    """Yields each package of the user's or of a library, and then imports what the configuration
    names from it."""
    for section in (config.model, config.task, config.optim):
        if section.given is None and plugins.is_users_own(section):
            yield section.name.partition(":" if ":" in section.name else ".")[0]
            plugins.own_function(section)
    if config.recipe.function is not None:
        yield config.recipe.function.partition(":")[0]
        users_function(config)
    for hook in config.hooks:
        if not is_object(hook):
            yield hook.partition(":")[0]
            if not plugins.of_python(hook):  # hooks_of() rejects it
                plugins.load_dotted(hook, config.where("hooks"))
