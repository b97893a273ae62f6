"""Features that exclude nothing by themselves: others say where these cannot go with them."""

from __future__ import annotations

from typing import Any

from hvdtrain.config.schema import Config
from hvdtrain.features.job_feature import JobFeature, value_of


def _plain(key: str, usual: Any, *examples: str) -> JobFeature:
    """A feature that is on where a key has another value than the usual one."""

    def on(config: Config) -> bool:
        return bool(value_of(config, key) != usual)

    return JobFeature(key=key, on=on, examples=examples)


FEATURES = (
    _plain("norm.kind", "batch", "norm.kind=ghost norm.ghost=3"),
    _plain("speed.precision", "fp32", "speed.precision=bf16", "speed.precision=fp16"),
    _plain("speed.compile", "none", "speed.compile=default"),
    _plain("speed.channels_last", None, "speed.channels_last=true"),
    _plain("optim.clip_norm", None, "optim.clip_norm=0.05"),
    _plain("recipe.growth", "none", "recipe.growth=milestones recipe.grow_at=[2steps] recipe.grow_to=[80]"),
    _plain("recipe.schedule", "constant", "recipe.schedule=plateau"),
    _plain("recipe.gradient_noise", 0.0, "recipe.gradient_noise=0.01"),
    _plain("recipe.sample_noise", 0.0, "recipe.sample_noise=0.5 optim.base_batch=6"),
    _plain("data.sampling", "global", "data.sampling=partition"),
    _plain("augment.mixup", 0.0, "augment.mixup=0.3"),
    _plain("guard.nonfinite", "stop", "guard.nonfinite=skip", "guard.nonfinite=rollback"),
    _plain("checkpoint.keep_best", 0, "checkpoint.keep_best=1"),
    _plain("log.step_times", False, "log.step_times=true"),
)
