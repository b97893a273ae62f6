"""The configuration keys that a custom loop supports; the other keys describe the trainer's
loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hvdtrain.config.read import assignments
from hvdtrain.config.schema import known_keys
from hvdtrain.errors import UserError, nearest, short
from hvdtrain.features import lost
from hvdtrain.features.every_feature import FEATURES
from hvdtrain.frameworks.user_loop import frameworks_of_user_loops

WHERE = "hvdtrain.init()"
KEYS = (
    *("framework", "run", "resume", "seed"),
    *(
        f"comm.{name}"
        for name in (
            "engine",
            "address",
            "timeout_s",
            "bind",
            "reduce",
            "bucket_mb",
            "compression",
            "op",
            "tune",
            "local_steps",
        )
    ),
    *(f"comm.{name}" for name in ("hierarchical", "cycle_ms", "fusion_mb", "device_memory")),
    *(f"shard.{name}" for name in ("stage", "group", "offload", "reshard")),
    *("optim.clip_norm", "optim.clip_value"),
    *(
        f"data.{name}"
        for name in ("inputs", "sampling", "ahead", "readers", "workers", "pad", "mask")
    ),
    *("speed.device", "speed.precision", "speed.compile"),
    *(
        f"checkpoint.{name}"
        for name in ("every_steps", "every_minutes", "every", "keep_last", "keep_best")
    ),
    *(
        f"guard.{name}"
        for name in (
            "max_time",
            "stall_s",
            "start_s",
            "nonfinite",
            "nonfinite_limit",
            "equal_steps",
            "mtbf_hours",
        )
    ),
    *(f"log.{name}" for name in ("every_steps", "every_s", "per_rank", "trackers")),
    *(key for feature in FEATURES for key in feature.keys_of_custom_loops),
)
OF_SAMPLES = ("epochs", "batch.size")  # arguments of ctx.samples(), besides the seed
_OF_THE_CALLS = {
    "epochs": "ctx.samples(dataset, batch=..., epochs=...)",
    "batch.size": "ctx.samples(dataset, batch=...)",
    "batch.per_rank": "ctx.samples(dataset, batch=...): of all ranks, so that their number "
    "changes nothing",
    "model.name": "ctx.prepare(model, optimizer)",
    "optim.name": "ctx.prepare(model, optimizer)",
    "optim.base_lr": "the optimizer has its rate, and a scheduler of torch changes it",
    "data.name": "ctx.samples(dataset, batch=...)",
    "stop.steps": "break out of the loop; guard.max_time stops it to be resumed",
    **{feature.key: feature.own_loop for feature in FEATURES if feature.own_loop},
}


def refuse_other_keys(config_file: str | None, arguments: Sequence[str], where: str) -> None:
    """Raises UserError for keys and values that only the trainer's loop supports.

    where: the script's call; only hvdtrain.run() supports guard.lost.
    """
    for key, value, origin in assignments(config_file, arguments):
        if key == lost.LOST.key and (value == "stop" or (value == lost.IN_RUN and where != WHERE)):
            continue
        if key in known_keys() and key not in KEYS:
            fix = _OF_THE_CALLS.get(
                key,
                "use hvdtrain.train(); a custom loop has "
                f"{', '.join(sorted({key.split('.')[0] for key in KEYS}))}",
            )
            raise UserError(f"{key} is not supported in a custom loop", f"{key}, {origin}", fix)
        if key not in KEYS:
            raise UserError(f"there is no key {short(key)}", f"{key}, {origin}", nearest(key, KEYS))
        if key == "framework" and value not in frameworks_of_user_loops():
            fix = f"framework={' or '.join(frameworks_of_user_loops())}; or hvdtrain.train()"
            raise UserError(
                f"framework={short(value)} does not support custom loops", f"{key}, {origin}", fix
            )
        if (key, value) == ("guard.nonfinite", "rollback"):
            fix = "guard.nonfinite=stop or skip"
            raise UserError(
                "guard.nonfinite=rollback cannot undo what a custom loop has done",
                f"{key}, {origin}",
                fix,
            )


def described() -> dict[str, Any]:
    """Returns the keys that describe a custom loop, as a tree of True: for config.yaml, events and
    reports."""
    tree: dict[str, Any] = {}
    for key in (*KEYS, *OF_SAMPLES):
        section, _, name = key.rpartition(".")
        (tree.setdefault(section, {}) if section else tree)[name] = True
    return tree
