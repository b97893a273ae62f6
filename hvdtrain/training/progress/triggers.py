"""When the ranks synchronize, when they evaluate, which targets are reached and when the job ends,
as pure functions of progress."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from hvdtrain.config.schema import Config
from hvdtrain.core.lengths import parse_duration
from hvdtrain.core.metrics import Sums, reaches
from hvdtrain.core.progress import Progress
from hvdtrain.recipe.clock import total_epochs, total_samples
from hvdtrain.recipe.recipe import Recipe
from hvdtrain.tasks.task import Task, objective
from hvdtrain.training.progress.event_fields import job_energy
from hvdtrain.training.progress.train_state import Reached, TrainState


def is_sync_point(config: Config, before: TrainState, p: Progress) -> bool:
    """Whether the ranks synchronize after the step that led to p; a resumed job does so at the same
    steps as an uninterrupted one."""
    intervals = (config.log.every_steps, config.checkpoint.every_steps, config.evaluate.every_steps)
    return (
        any(steps and p.step % steps == 0 for steps in intervals)
        or p.epoch > before.epoch
        or p.done
        or p.step == config.stop.steps
    )


def steps_to_sync_point(
    config: Config, recipe: Recipe, before: TrainState
) -> tuple[list[Progress], Progress]:
    """Returns the progress before each step up to the next sync point, and the progress there."""
    steps = [before.progress]
    p = before.progress
    while True:
        p = p.advance(recipe.at(p).batch)
        if is_sync_point(config, before, p):
            return steps, p
        steps.append(p)


def is_at_its_end(config: Config, p: Progress) -> bool:
    """Whether the job has read all its samples or done all its steps."""
    return p.done or (config.stop.steps is not None and p.step >= config.stop.steps)


def evaluation_due(config: Config, now: TrainState) -> bool:
    """Whether an evaluation is due and not done: at the end of an epoch, by evaluate.every_steps,
    or after the last step."""
    p = now.progress
    every = config.evaluate.every_steps
    is_due = (
        p.epoch > now.epoch
        or is_at_its_end(config, p)
        or (every is not None and p.step // every > now.evaluated // every)
    )
    return p.step > now.evaluated and is_due


def time_is_over(config: Config, seconds: float) -> bool:
    """Whether a job's time is up after `seconds` over all its runs, by rank 0's clock, which
    decides for all ranks."""
    limit_s = stop_seconds(config)
    return limit_s is not None and seconds >= limit_s


def stop_seconds(config: Config) -> float | None:
    """stop.time."""
    return None if config.stop.time is None else parse_duration(config.stop.time, "stop.time")


def target_is_held(config: Config, now: TrainState) -> bool:
    """Whether the last stop.target_for evaluations were at stop.target."""
    return config.stop.target is not None and now.at_target >= config.stop.target_for


def patience_is_over(config: Config, now: TrainState) -> bool:
    """Whether the last stop.patience evaluations were no better than one before them."""
    return config.stop.patience is not None and now.without_better >= config.stop.patience


def stop_reason(config: Config, now: TrainState) -> str:
    """Returns why the job is complete; empty while it is not. The same on all ranks."""
    target = config.stop.target
    if evaluation_due(config, now):
        return ""
    if target_is_held(config, now):
        return (
            f"stop.target={target:g} held for {now.at_target} "
            f"evaluation{'s' if now.at_target > 1 else ''}"
        )
    if patience_is_over(config, now):
        by = f" by more than {config.stop.min_delta:g}" if config.stop.min_delta else ""
        count = f"{now.without_better} evaluation{'s' if now.without_better > 1 else ''}"
        return (
            f"stop.patience={config.stop.patience}: {count} without a better {now.objective} than "
            f"{now.to_beat:.4f}{by}"
        )
    if config.stop.steps is not None and now.progress.step >= config.stop.steps:
        return f"stop.steps={config.stop.steps}"
    if not now.progress.done:
        return ""
    is_of_epochs = now.progress.samples >= total_samples(config, now.progress.dataset)
    return (
        f"epochs={total_epochs(config):g}"
        if is_of_epochs
        else now.ended_by or f"stop.time={config.stop.time}"
    )


def after_evaluation(
    config: Config,
    task: Task,
    now: TrainState,
    val: Sums,
    seconds: float,
    energy_kinds: Collection[str],
) -> tuple[TrainState, list[Reached]]:
    """Returns the state after the evaluation with the sums `val`, and the targets of log.targets
    and stop.target that it is the first to reach.

    A target that an earlier evaluation already reached, before a resume added it, is skipped: its
    time is unknown.
    """
    after = now.after_evaluation(
        objective(task).of(val), config.stop.target, seconds, config.stop.min_delta
    )
    targets = {target for target in (*config.log.targets, config.stop.target) if target is not None}
    open_targets = targets - {past.target for past in now.reached}
    joules = job_energy(after, energy_kinds)
    reached = [
        Reached(
            target=target,
            value=after.last,
            seconds=round(seconds, 3),
            epochs=after.progress.epochs,
            images=after.progress.samples,
            joules=sum(joules.values()) if joules else None,
        )
        for target in sorted(open_targets, reverse=now.better == "min")
        if reaches(after.last, target, now.better) and not reaches(now.best, target, now.better)
    ]
    return replace(after, reached=(*after.reached, *reached)), reached
