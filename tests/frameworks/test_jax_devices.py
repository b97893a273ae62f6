"""speed.devices in JAX: a rank divides its rows over several devices, and computes what it computes
on one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from jax_devices_on_ranks import JOBS, TWO
from pool import on_ranks
from ranks import needs_mpirun
from same_curve import check_same

from hvdtrain.comm.communicator import SingleProcessCommunicator
from hvdtrain.config.read import configure
from hvdtrain.errors import UserError
from hvdtrain.frameworks.jax.build import pick_devices
from hvdtrain.frameworks.jax.learner import rows_for
from hvdtrain.tasks.classification import Classification
from hvdtrain.training.build import build_learner


@pytest.mark.in_turn
@needs_mpirun
def test_ranks_with_two_devices_are_one_process_with_one() -> None:
    found = on_ranks("mpi", 2, "jax_devices_on_ranks:curves", env=TWO)[0]
    assert found.keys() == JOBS.keys()
    for name, (one, two) in found.items():
        check_same(name, two, one)


@pytest.mark.in_turn
@needs_mpirun
@pytest.mark.parametrize(
    "model",
    [
        "model.name=convnet model.widths=[4,6]",
        pytest.param(
            "model.name=mlp model.widths=[9,7,8] model.dropout=0.4", marks=pytest.mark.slow
        ),
    ],
)
def test_each_device_has_its_rows_and_all_weights(model: str) -> None:
    """Seven samples take eight rows; norms are over a rank's samples, and dropout draws for each;
    weights stay where they are."""
    for found in on_ranks("mpi", 2, "jax_devices_on_ranks:places", model, env=TWO):
        assert (
            found["apart"] < 1e-12
            and found["rows"] == [4, 4]
            and all(found["weights"])
            and len(found["weights"]) >= 16
        ), found
        assert "jax float64 on cpu:0+1" in found["described"] and found["devices"] == 2


def test_rows_are_as_many_for_each_device() -> None:
    for devices in (1, 2, 3, 8):
        rows = {n: rows_for(n, 21, devices) for n in range(1, 22)}
        assert all(
            found % devices == 0 and n <= found < rows_for(n, 21) + devices
            for n, found in rows.items()
        )
        assert len(set(rows.values())) <= len({rows_for(n, 21) for n in rows})


def test_devices_that_are_not_there_are_refused() -> None:
    task = Classification((3, 3, 1), 3, np.array([0.4]), np.array([0.2]))
    with pytest.raises(UserError) as caught:
        build_learner(
            configure(None, ["framework=jax", "model.name=linear", "speed.devices=64"]),
            task,
            SingleProcessCommunicator(),
        )
    assert caught.value.what.startswith("local rank 0 takes devices 0 to 63 of JAX, which has ")
    assert (
        caught.value.where.startswith("speed.devices")
        and "--xla_force_host_platform_device_count=N" in caught.value.fix
    )


def test_ranks_share_no_device_of_a_gpu_host() -> None:
    """Four devices: two ranks with two each; a third finds none, unless each rank sees its own
    alone."""

    def of(local_rank: int, count: int) -> list[int]:
        devices = [SimpleNamespace(id=number, platform="gpu") for number in range(count)]
        jax = SimpleNamespace(local_devices=lambda backend=None: devices)
        ranks: Any = SimpleNamespace(local_rank=local_rank)
        return [
            device.id
            for device in pick_devices(
                jax, configure(None, ["framework=jax", "speed.devices=2"]), ranks
            )
        ]

    assert of(0, 4) == [0, 1] and of(1, 4) == [2, 3] and of(5, 2) == [0, 1]
    with pytest.raises(
        UserError, match="local rank 2 takes devices 4 to 5 of JAX, which has 4 here"
    ):
        of(2, 4)
