"""What each number of the configuration must satisfy."""

from __future__ import annotations

# key -> (lowest, highest, how a message says it). None (left out) always passes.
LIMITS: dict[str, tuple[float, float, str]] = {
    "epochs": (1, 1e9, "1 or more"),
    "max_steps": (1, 1e15, "1 or more"),
    "seed": (0, 2**63 - 1, "0 or more"),
    "batch.size": (1, 1e9, "1 or more"),
    "batch.per_rank": (1, 1e9, "1 or more"),
    "batch.micro": (1, 1e9, "1 or more"),
    "batch.evaluate": (1, 1e9, "1 or more"),
    "model.label_smoothing": (0, 1, "0 to 1"),
    "model.classifier_std": (0, 1e6, "0 or more"),
    "optim.base_lr": (0, 1e6, "0 or more"),
    "optim.base_batch": (1, 1e9, "1 or more"),
    "optim.momentum": (0, 0.9999999, "0 or more and less than 1"),
    "optim.weight_decay": (0, 1e6, "0 or more"),
    "optim.clip_norm": (1e-30, 1e30, "more than 0"),
    "optim.clip_value": (1e-30, 1e30, "more than 0"),
    "recipe.warmup_epochs": (0, 1e9, "0 or more"),
    "recipe.warmup_steps": (0, 1e9, "0 or more"),
    "recipe.warmup_from": (0, 1e6, "0 or more"),
    "recipe.gamma": (0, 1e3, "0 to 1000"),
    "recipe.power": (0, 100, "0 to 100"),
    "recipe.end_lr": (0, 1e6, "0 or more"),
    "recipe.batch_max": (1, 1e9, "1 or more"),
    "recipe.sample_noise": (0, 1e6, "0 or more"),
    "recipe.gradient_noise": (0, 1e6, "0 or more"),
    "norm.ghost": (1, 1e9, "1 or more"),
    "comm.bucket_mb": (2**-10, 2**14, "1/1024 to 16384"),
    "stop.target_accuracy": (0, 1, "0 to 1"),
    "stop.patience": (1, 1e9, "1 or more"),
    "checkpoint.keep_last": (1, 1e9, "1 or more"),
    "log.every_steps": (1, 1e9, "1 or more"),
    "log.every_s": (0, 1e9, "0 or more"),
}
