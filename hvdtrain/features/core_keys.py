"""Configuration keys that belong to no feature: every job has them."""

from __future__ import annotations

from collections.abc import Iterator

CORE_KEYS: dict[str, str] = {  # by section
    "": "framework run resume epochs seed",
    "data": "name root stage mean std class_names resident ahead workers",
    "task": "name",
    "batch": "size per_rank evaluate",
    "model": "name loss label_smoothing classifier_std download",
    "optim": "name base_lr base_batch momentum weight_decay exclude clip_value",
    "recipe": "scale warmup warmup_kind warmup_from function chain adapt_regime",
    "comm": "engine address timeout_s reduce bucket_mb",
    "speed": "device deterministic",
    "stop": "steps time restore_best",
    "checkpoint": "every_steps every_minutes keep_last",
    "guard": "max_time stall_s start_s equal_steps",
    "log": "every_steps every_s display per_rank trackers",
    "profile": "steps",
}


def core_keys() -> Iterator[str]:
    """Yields the core keys: framework, data.name and so on."""
    for section, names in CORE_KEYS.items():
        yield from (f"{section}.{name}".lstrip(".") for name in names.split())
