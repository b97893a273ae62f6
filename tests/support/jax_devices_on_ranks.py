"""JAX jobs whose ranks have two devices each, compared with the same jobs with one device, on the
ranks."""

from __future__ import annotations

from typing import Any

import invariance
import jax
import numpy as np
from shards_on_ranks import MLP

from hvdtrain.comm.communicator import Communicator, SingleProcessCommunicator
from hvdtrain.config.read import configure
from hvdtrain.core.progress import Hyper
from hvdtrain.tasks.classification import Classification
from hvdtrain.training.build import build_learner

TWO = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
JOBS = {
    "mlp, sgd": f"{MLP} optim.name=sgd optim.base_lr=0.2 batch.micro=3",
    "mlp, stage 2, lamb, "
    "clipping": f"{MLP} optim.name=lamb optim.base_lr=0.02 optim.clip_norm=0.5 batch.micro=5 "
    "shard.stage=2",
}
TASK = Classification((5, 4, 1), 3, np.array([0.4]), np.array([0.2]))


def curves(communicator: Communicator) -> dict[str, list[Any]]:
    """Returns each job's curves on one process with one device, and on the ranks with two devices
    each."""
    alone = SingleProcessCommunicator()
    return {
        name: [
            invariance.losses(f"framework=jax {words}".replace("shard.stage=2", ""), alone),
            invariance.losses(f"framework=jax {words} speed.devices=2", communicator),
        ]
        for name, words in JOBS.items()
    }


def places(communicator: Communicator, model: str) -> dict[str, Any]:
    """Where arrays are, and the largest difference from one device, after a load."""
    words = f"framework=jax speed.precision=fp64 batch.size=14 {model}"
    one: Any
    two: Any
    one, two = (
        build_learner(
            configure(None, f"{words} speed.devices={devices}".split()), TASK, communicator
        )
        for devices in (1, 2)
    )
    rng = np.random.default_rng(communicator.rank)
    samples = {
        "x": rng.integers(0, 256, (7, *TASK.shape), dtype=np.uint8),
        "y": rng.integers(0, 3, 7),
    }
    hyper = Hyper(lr=0.1, momentum=0.9, weight_decay=0.01, batch=14, step=0)
    one.step([one.to_device(samples)], hyper, 3)
    two.load(one.state())
    apart = 0.0
    for _ in range(2):
        found, expected = (
            float(each.step([each.to_device(samples)], hyper, 4)["loss"]) for each in (two, one)
        )
        apart = max(apart, abs(found - expected))
    states = one.state(), two.state()
    apart = max(
        apart, *(float(np.abs(states[1][name] - array).max()) for name, array in states[0].items())
    )
    outputs = [each.predict(each.to_device(samples)).outputs for each in (one, two)]
    rows = two.to_device(samples).arrays["x"]
    return {
        "apart": max(apart, float(np.abs(outputs[0] - outputs[1]).max())),
        "rows": [shard.data.shape[0] for shard in rows.addressable_shards],
        "weights": [
            shard.data.shape == p.shape for p in two.weights for shard in p.addressable_shards
        ],
        "described": two.describe(),
        "devices": jax.local_device_count(),
    }
