"""When the ranks synchronize, when they evaluate and when the job ends, as pure functions of progress."""

from __future__ import annotations

from hvdtrain.config.schema import Config
from hvdtrain.core.progress import Progress
from hvdtrain.training.progress.train_state import TrainState


def is_sync_point(config: Config, before: TrainState, p: Progress) -> bool:
    """Whether the ranks synchronize after the step that led to p; a resumed job does so at the same steps as one without a stop."""
    intervals = (config.log.every_steps, config.checkpoint.every_steps)
    return any(steps and p.step % steps == 0 for steps in intervals) or p.epoch > before.epoch or p.step == config.max_steps


def evaluation_due(config: Config, now: TrainState) -> bool:
    """Whether an epoch, or the last step of max_steps, has not been evaluated yet."""
    p = now.progress
    return p.step > now.evaluated and (p.epoch > now.epoch or (config.max_steps is not None and p.step >= config.max_steps))


def stop_reason(config: Config, now: TrainState) -> str:
    """Why the job is over; empty while it is not. The same on all ranks."""
    target = config.stop.target_accuracy
    if evaluation_due(config, now):
        return ""
    if target is not None and now.at_target >= config.stop.patience:
        return f"stop.target_accuracy={target:g} held for {now.at_target} epoch{'s' * (now.at_target > 1)}"
    if config.max_steps is not None and now.progress.step >= config.max_steps:
        return f"max_steps={config.max_steps}"
    return f"epochs={now.progress.total // now.progress.dataset}" if now.progress.done else ""
