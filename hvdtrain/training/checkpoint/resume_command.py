"""The command that goes on from a run folder, as a user types it."""

from __future__ import annotations

import math
import shlex
from pathlib import Path

from hvdtrain.config.length import as_given
from hvdtrain.config.plugins import is_dotted, is_users_own
from hvdtrain.config.schema import Config
from hvdtrain.core.program import command_line
from hvdtrain.recipe.clock import total_samples
from hvdtrain.training.progress.train_state import TrainState
from hvdtrain.training.progress.triggers import patience_is_over, target_is_held, time_is_over


def resume_command(config: Config, run: Path, *arguments: str) -> str:
    """With these arguments more. Code and a cache that a run folder names are used only where the command names them too."""
    if any(section.name.startswith("__main__:") or section.given for section in (config.data, config.task, config.model)):
        return f"the same script, with {shlex.join([f'resume={run}', *arguments])}"
    command = [f"resume={run}"]
    for section in (config.data, config.task, config.model):
        if is_users_own(section):
            command.append(f"{section.section}.name={section.name}")
    if is_dotted(config.optim.name) and not config.optim.name.startswith("torch.optim."):
        command.append(f"optim.name={config.optim.name}")
    if config.data.options.get("cache") is not None:
        command.append(f"data.cache={config.data.options['cache']}")
    return command_line(*command, *(argument for argument in arguments if argument not in command))


def further(config: Config, now: TrainState) -> list[str]:
    """The arguments that extend a job that is over: one for each limit that it has reached."""
    arguments = []
    if config.stop.steps is not None and now.progress.step >= config.stop.steps:
        arguments.append(f"stop.steps={2 * now.progress.step}")
    if target_is_held(config, now):
        arguments.append("stop.target=null")
    if patience_is_over(config, now):
        arguments.append(f"stop.patience={2 * now.without_better}")
    if time_is_over(config, now.seconds):
        arguments.append(f"stop.time={2 * math.ceil(now.seconds)}s")
    if config.epochs is not None and (now.progress.samples >= total_samples(config, now.progress.dataset) or not arguments):
        arguments.append(f"epochs={as_given(2 * max(config.epochs, now.epoch))}")
    return arguments
