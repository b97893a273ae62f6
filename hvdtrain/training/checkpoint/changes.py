"""What a command changes in the configuration of the run that it resumes, and the command that
resumes a run folder."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from hvdtrain.config import plugins
from hvdtrain.config.plugins import is_dotted, is_users_own
from hvdtrain.config.read import read_run_config, resolve_recorded
from hvdtrain.config.schema import Config
from hvdtrain.core.lengths import as_given
from hvdtrain.core.process import command_line
from hvdtrain.errors import UserError, short
from hvdtrain.events import redaction
from hvdtrain.features.every_feature import unread_keys
from hvdtrain.recipe.clock import total_samples
from hvdtrain.training.progress.train_state import TrainState
from hvdtrain.training.progress.triggers import (
    patience_is_over,
    stop_reason,
    target_is_held,
    time_is_over,
)

PLACE = ("run", "resume")  # where a job is stored; neither saved nor compared

# If only these keys differ, a job is the same job: they select where it runs, how fast, and what it
# writes. Results are equal up to rounding.
_SAME_JOB = (
    *(
        "framework",
        "data.root",
        "data.stage",
        "data.resident",
        "data.ahead",
        "data.readers",
        "data.workers",
        "data.cache",
        "data.class_names",
        "batch.micro",
        "batch.evaluate",
        "evaluate.every_steps",
    ),
    *(
        "comm.engine",
        "comm.address",
        "comm.timeout_s",
        "comm.reduce",
        "comm.bind",
        "comm.bucket_mb",
        "comm.tune",
        "comm.hierarchical",
        "comm.cycle_ms",
    ),
    *(
        "comm.fusion_mb",
        "comm.device_memory",
        "speed.device",
        "speed.devices",
        "speed.channels_last",
        "speed.compile",
        "speed.deterministic",
        "speed.peak_tflops",
    ),
    *("hooks", "checkpoint.", "guard.", "log.", "profile."),
)
# comm.local_steps also averages the weights at these points
_SYNC_POINTS = (
    "log.every_steps",
    "checkpoint.every_steps",
    "evaluate.every_steps",
)
_COLUMNS = "data.fields."  # columns of a table, which earlier versions do not record
_LENGTH = ("epochs", "stop.")  # when it ends
_FORM = "form"  # an option of lars: its momentum has the learning rate inside, or outside
_MOST_SHOWN = 6  # changes in a message


class Change(NamedTuple):
    """A key whose value differs from the run's config.yaml; secrets are hidden."""

    key: str
    before: Any
    now: Any

    def __str__(self) -> str:
        return f"changed {self.key}: {self.before} -> {self.now}"


def changes(run: Path, config: Config) -> list[Change]:
    """Returns the changes, by key. Raises UserError if the run's config.yaml cannot be read."""
    recorded = list(read_run_config(run))
    former = resolve_recorded(recorded, {one.key for one in recorded}, unread_keys)
    before = flat(former.model_dump())
    after = flat(config.model_dump())
    shown_before = redaction.redact(before)
    shown_after = redaction.redact(after)
    return [
        Change(key, shown_before.get(key), shown_after.get(key))
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key)
        and key not in PLACE
        and not (key.startswith(_COLUMNS) and before.get(key) is None)
    ]


def ended_by_hook(now: TrainState, found: Sequence[Change]) -> TrainState:
    """Returns the state of a job that a hook has ended: complete, unless the command changes its
    length or its hooks."""
    if not now.ended_by:
        return now
    if any(_is_one_of(change.key, ("hooks", *_LENGTH)) for change in found):
        return replace(now, ended_by="")
    return replace(now, progress=now.progress.end_here())


def refuse_another_optimizer(found: list[Change], config: Config, run: Path) -> None:
    """Raises UserError if this job's optimizer would interpret the optimizer state in the run's
    checkpoints differently.

    Two classes of torch.optim are compared when the state is loaded: one class may have several
    import paths.
    """
    changed = {key: (before, now) for key, before, now in found}
    for key in ("optim.name", f"optim.{_FORM}"):
        before, now = changed.get(key, (None, None))
        if key == "optim.name" and before != now and is_dotted(before) and is_dotted(now):
            return
        if key != "optim.name":
            before, now = (
                _default_form(config) if form is None else form for form in (before, now)
            )
        if before != now:
            what = (
                f"the checkpoint was written with {key}={before}, but this job has {key}={now}, "
                "so the optimizer's state would not be valid"
            )
            raise UserError(
                what, str(run), f"{key}={before}; or run=ANOTHER resume=no for a new job"
            )


def refuse_another_model(found: list[Change], config: Config, run: Path) -> None:
    """Raises UserError if an option of the model, such as convnet's norm, had another default in
    the framework that the run used before."""
    changed = {change.key: change for change in found}
    name = config.model.name
    if "framework" not in changed or is_dotted(name):
        return
    former = changed["framework"].before
    before, now = (
        _defaults_of(name, framework, config) for framework in (former, config.framework)
    )
    for option in sorted(
        option for option in before.keys() & now.keys() if before[option] != now[option]
    ):
        key = f"model.{option}"
        value = config.model.options.get(option, now[option])
        known = changed[key].before if key in changed else config.model.options.get(option)
        trained = before[option] if known is None else known
        if trained != value:
            what = (
                f"the checkpoint was written with {key}={json.dumps(trained)}, but "
                f"framework={config.framework} uses {json.dumps(value)}"
            )
            fix = (
                f"framework={former}; or run=ANOTHER resume=no for a new job, with {key} set: "
                "defaults differ"
            )
            raise UserError(what, str(run), fix)


def _defaults_of(name: str, framework: str, config: Config) -> dict[str, Any]:
    """Returns the options of a model in a framework, with their defaults."""
    folder = plugins.folder_of("model", framework)
    if name not in plugins.files(folder):
        return {}
    fields = plugins.options_of(plugins.find(folder, name, config.where("model.name"))).model_fields
    return {option: field.default for option, field in fields.items()}


def _default_form(config: Config) -> Any:
    """Returns the default form of the job's optimizer, if it has several forms."""
    if is_dotted(config.optim.name):
        return None
    field = plugins.options_of(
        plugins.find("optim", config.optim.name, config.where("optim.name"))
    ).model_fields.get(_FORM)
    return field and field.default


def refuse_another_job(
    found: list[Change], config: Config, run: Path, now: TrainState, misfit: str = ""
) -> None:
    """Raises UserError if the run folder would record a configuration that its weights were not
    trained with.

    misfit: why its checkpoint cannot be loaded with the changes, so that no command can resume with
    them; empty if it can.

    This applies to a complete job with any change in what it learns or how long, and to an
    incomplete job with a change in what it learns, unless resume=RUN asks for it. A changed secret
    does not count.
    """
    over = stop_reason(config, now)
    learns = _SYNC_POINTS if config.comm.local_steps > 1 else ()
    if config.recipe.schedule == "plateau":
        learns = (*learns, "evaluate.every_steps")  # evaluations change the rate
    same = [
        change for change in found if _is_one_of(change.key, _SAME_JOB) and change.key not in learns
    ]
    relevant = [change for change in found if change.before != change.now and change not in same]
    learned = [change for change in relevant if not _is_one_of(change.key, _LENGTH)]
    if over and relevant:
        what = (
            f"{run} is complete ({over}), so the change would have no effect: "
            f"{_differences(relevant)}"
        )
        then = "train on with it"
        arguments = [*map(_argument, learned), *further(config, now)]
    elif learned and config.resume in ("auto", "no"):
        what = f"{run} contains another job: {_differences(learned)}"
        then = f"resume from step {now.progress.step} with the change"
        arguments = [_argument(change) for change in relevant]
    else:
        return
    if misfit:
        fix = f"run=ANOTHER resume=no for a new job; it cannot be resumed with the change: {misfit}"
    else:
        fix = f"run=ANOTHER for a new job; to {then}: {resume_command(config, run, *arguments)}"
    raise UserError(what, str(run / "config.yaml"), fix)


def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns {"data.name": ..., "model.widths": ...}"""
    flattened: dict[str, Any] = {}
    for key, value in tree.items():
        flattened |= (
            flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
        )
    return flattened


def _is_one_of(key: str, keys: Sequence[str]) -> bool:
    """Whether a key is one of these, or lies in one of these sections, such as "log."."""
    return any(key == one or (one.endswith(".") and key.startswith(one)) for one in keys)


def _differences(found: list[Change]) -> str:
    shown = [
        f"{key} is {short(before, 60)} there, {short(now, 60)} here"
        for key, before, now in found[:_MOST_SHOWN]
    ]
    return "; ".join(shown) + (
        f"; and {len(found) - _MOST_SHOWN} more" if len(found) > _MOST_SHOWN else ""
    )


def _argument(change: Change) -> str:
    return f"{change.key}={change.now if isinstance(change.now, str) else json.dumps(change.now)}"


def resume_command(config: Config, run: Path, *arguments: str) -> str:
    """Returns the command that resumes a run, with additional arguments. Code and a cache that a
    run folder names are used only if the command names them too."""
    sections = (config.data, config.task, config.model, config.optim)
    of_script = any(
        name.startswith("__main__:")
        for name in (
            *(section.name for section in sections),
            *config.hooks,
            config.recipe.function or "",
        )
    )
    if of_script or any(section.given for section in (config, config.recipe, *sections)):
        return f"the same script, with {shlex.join([f'resume={run}', *arguments])}"
    command = [f"resume={run}"]
    for section in sections:
        if is_users_own(section) and not section.name.startswith("torch.optim."):
            command.append(f"{section.section}.name={section.name}")
    if config.recipe.function is not None:
        command.append(f"recipe.function={config.recipe.function}")
    if config.hooks:
        command.append(f"hooks={json.dumps(config.hooks)}")
    if config.data.options.get("cache") is not None:
        command.append(f"data.cache={config.data.options['cache']}")
    return command_line(*command, *(argument for argument in arguments if argument not in command))


def further(config: Config, now: TrainState) -> list[str]:
    """Returns the arguments that extend a complete job: one for each limit that it has reached."""
    arguments = []
    if config.stop.steps is not None and now.progress.step >= config.stop.steps:
        arguments.append(f"stop.steps={2 * now.progress.step}")
    if target_is_held(config, now):
        arguments.append("stop.target=null")
    if patience_is_over(config, now):
        arguments.append(f"stop.patience={2 * now.without_better}")
    if time_is_over(config, now.seconds):
        arguments.append(f"stop.time={2 * math.ceil(now.seconds)}s")
    if config.epochs is not None and (
        now.progress.samples >= total_samples(config, now.progress.dataset) or not arguments
    ):
        arguments.append(f"epochs={as_given(2 * max(config.epochs, now.epoch))}")
    return arguments
