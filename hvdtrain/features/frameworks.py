"""framework=jax, keras and numpy: the features of framework=torch that they do not support."""

from __future__ import annotations

from typing import Any, NamedTuple

from hvdtrain.config.exclusion import Exclusion, Values, among, as_yaml
from hvdtrain.features.job_feature import JobFeature


class Supported(NamedTuple):
    """The values of a key that a framework supports, the one to suggest first, and an example of
    one that it does not."""

    values: tuple[Any, ...]
    other: Any
    words: str = ""  # words that the example needs in addition


NOT_TORCH: dict[str, Supported] = {
    "speed.precision": Supported(("fp32", "fp64", "auto"), "bf16"),
    "speed.compile": Supported(("none",), "default"),
    "speed.channels_last": Supported((None,), True),
    "speed.deterministic": Supported((False,), True),
    "speed.peak_tflops": Supported((None,), 0.5),
    "data.resident": Supported((None, False), True),
    "data.pad": Supported(({},), '{"tokens":0}'),
    "data.pack": Supported((None,), 64),
    "comm.compression": Supported(("none",), "fp16"),
    "comm.op": Supported(("mean",), "adasum"),
    "comm.local_steps": Supported((1,), 2),
    "comm.tune": Supported((False,), True),
    "comm.device_memory": Supported(("auto",), "host"),
    "comm.reduce": Supported(("auto",), "bucket"),
    "shard.stage": Supported((0,), 1),
    "shard.group": Supported(("all",), "node", "shard.stage=1"),
    "shard.offload": Supported(("none",), "optimizer", "shard.stage=1"),
    "model.classifier_std": Supported((None,), 0.01),
    "model.download": Supported((False,), True),
    "model.freeze": Supported(([],), ["*.bias"]),
    "model.lora": Supported(([],), ["fc*"]),
    "model.thaw": Supported(([],), '[{"at":1,"names":["*.bias"]}]'),
}
IN_JAX = {key: row for key, row in NOT_TORCH.items() if key != "shard.stage"} | {
    "speed.device": Supported(("auto", "cpu", "cuda"), "xpu")
}
IN_NUMPY = NOT_TORCH | {
    "shard.group": Supported(("all",), "node"),  # without shard.stage
    "shard.offload": Supported(("none",), "optimizer"),
    "model.name": Supported(("linear",), "mlp"),
    "model.recompute": Supported(("none",), "all"),
    "norm.kind": Supported(("batch",), "sync"),
    "speed.device": Supported(("auto", "cpu"), "cuda"),
    "log.noise_scale": Supported((False,), True),
    "log.samples": Supported((0, None), 2, "task.name=language data.name=text"),
    "profile.steps": Supported((None,), "1:2"),
}

IN_KERAS = {key: row for key, row in IN_NUMPY.items() if key != "model.name"} | {
    "speed.device": Supported(
        ("auto",), "cpu"
    ),  # Keras chooses for its backend; CUDA_VISIBLE_DEVICES
}


def excluded(supported: dict[str, Supported]) -> tuple[Exclusion, ...]:
    """Returns rows of a framework that supports only some values of these keys."""
    return tuple(_exclusion(key, row) for key, row in supported.items())


def _exclusion(key: str, row: Supported) -> Exclusion:
    values = Values(lambda value: value not in row.values, row.other)
    usual = as_yaml(row.values[0]).replace("{", "{{").replace("}", "}}")  # the fix is a template
    return Exclusion(key, values, fix=f"{{key}}={usual}, or framework=torch", words=row.words)


DEVICES = JobFeature(
    key="speed.devices",
    on=lambda config: config.speed.devices > 1,
    examples=("speed.devices=2 framework=jax",),
    off="speed.devices=1",
    first=(
        Exclusion(
            "framework",
            Values(lambda framework: framework != "jax", "torch"),
            what="{set} uses one device on each rank, but the job has {chosen}",
            fix="as many ranks as there are devices; or framework=jax",
            where="speed.devices",
        ),
    ),
    excludes=(  # callbacks of a synchronized norm and the units of stage 3 use one device
        Exclusion(
            "shard.stage",
            among(3),
            what="{chosen} does not support {set}: a unit is gathered on one device",
            fix="shard.stage=2",
            where="speed.devices",
            why="a unit is gathered on one device",
        ),
        Exclusion(
            "norm.kind",
            among("sync"),
            what="{chosen} does not support {set}: ranks exchange the statistics of one device",
            fix="norm.kind=batch, which computes statistics over all devices of a rank",
            where="speed.devices",
            why="ranks exchange the statistics of one device",
        ),
    ),
)
JAX = JobFeature(
    key="framework",
    is_value=True,
    on=lambda config: config.framework == "jax",
    examples=("framework=jax",),
    off="framework=torch",
    why="only framework=torch implements it",
    excludes=excluded(IN_JAX),
)
KERAS = JobFeature(
    key="framework",
    is_value=True,
    on=lambda config: config.framework == "keras",
    examples=("framework=keras model.name=mine:build",),
    off="framework=torch",
    why="losses and updates are computed on the host",
    excludes=excluded(IN_KERAS),
)
NUMPY = JobFeature(
    key="framework",
    is_value=True,
    on=lambda config: config.framework == "numpy",
    examples=("framework=numpy model.name=linear",),
    off="framework=torch",
    why="framework=numpy is the reference for linear models",
    excludes=excluded(IN_NUMPY),
)
