"""Two ranks: local steps, early or late, compression to half the width, Adasum and tuned buckets
against arithmetic by hand."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest
from pool import on_ranks
from ranks import FULL, needs_horovod, needs_mpirun
from strategies_on_ranks import batch, hyper, learner

from hvdtrain.comm.communicator import SingleProcessCommunicator
from hvdtrain.core.arrays import digest

ENGINES = [
    pytest.param("mpi", marks=needs_mpirun),
    pytest.param("horovod", marks=[needs_mpirun, needs_horovod]),
    *[pytest.param("torchdist", marks=needs_mpirun)] * FULL,
]


@functools.cache
def found(engine: str) -> dict[str, Any]:
    found: dict[str, Any] = on_ranks(engine, 2, "strategies_on_ranks:everything", engine)[0]
    return found


@pytest.mark.in_turn
@pytest.mark.parametrize("engine", ENGINES)
def test_local_steps_end_in_the_mean_of_ranks_that_stepped_alone(engine: str) -> None:
    local = found(engine)["local"]
    assert max(local["gap 0"], local["gap 1"], local["gap 2"]) < 1e-13
    assert local["together 0"] == local["together 1"] == local["together 2"] == 1
    assert len(set(local["apart"])) == 2 and "3 local steps between averages" in local["model"]


@pytest.mark.parametrize("engine", ENGINES)
def test_ranks_are_together_up_to_local_from_and_average_every_third_step_after_it(
    engine: str,
) -> None:
    post_local = found(engine)["post-local"]
    (own, synchronous), *others = post_local["digests"]
    assert own == synchronous and others == [[own, synchronous]], "to the bit"
    assert post_local["distinct"] == [2, 2, 1, 2, 2, 1, 2, 1], "the last by a sync point"
    assert post_local["gap"] < 1e-13
    assert re.search(
        r"gradients in 1 (overlapped )?bucket; from 2 steps on 3 local steps between averages",
        post_local["model"],
    )


@pytest.mark.parametrize("words", [(), ("comm.reduce=bucket",)])
def test_local_steps_of_one_rank_are_its_steps(words: tuple[str, ...]) -> None:
    communicator = SingleProcessCommunicator()
    plain, late = (
        learner(communicator),
        learner(communicator, "comm.local_steps=2", "comm.local_from=2steps", *words),
    )
    for step in range(5):
        samples = batch(6, step)
        plain.step([plain.to_device(samples)], hyper(6, step), step)
        late.step([late.to_device(samples)], hyper(6, step)._replace(together=step < 2), step)
    late.sync_buffers(communicator)
    assert digest(late.state()) == digest(plain.state())
    assert ("from 2 steps on 2 local steps" in late.describe()) == bool(words)


@pytest.mark.parametrize("engine", ENGINES)
def test_compression_only_rounds(engine: str) -> None:
    wires = {kind: found(engine)[kind] for kind in ("fp16", "bf16") if kind in found(engine)}
    assert set(wires) == ({"fp16"} if engine == "horovod" else {"fp16", "bf16"})
    for kind, wire in wires.items():
        assert (
            1e-6 < wire["gap"] < {"fp16": 2e-3, "bf16": 1e-2}[kind]
            and len(set(wire["digests"])) == 1
        )
        assert {"fp16": "as float16", "bf16": "as bfloat16"}[kind] in wire["model"]


@pytest.mark.parametrize("engine", ENGINES)
def test_half_numbers_are_summed(engine: str) -> None:
    """Of numbers up to 9, spaced by 2^-7 and 2^-4 there: two roundings of half a space, of the
    numbers before."""
    sums = found(engine)["sums"]
    assert 0 < sums["torch.float16"] <= 2**-7
    if engine == "horovod":
        assert sums["torch.bfloat16"].startswith("the horovod engine has no allreduce of bfloat16")
    else:
        assert 0 < sums["torch.bfloat16"] <= 2**-4


@pytest.mark.parametrize("engine", ENGINES)
def test_tuned_buckets_are_the_same_on_all_ranks_and_change_nothing(engine: str) -> None:
    tuned = found(engine)["tuned"]
    assert len(set(tuned["models"])) == 1 and tuned["gap"] < 1e-6
    count, size = re.search(
        r"in (\d+) (?:overlapped )?buckets? of ([0-9.]+) MiB, as tuned", tuned["models"][0]
    ).groups()
    assert (int(count), float(size)) in ((3, 0.5), (2, 0.5), (2, 1), (2, 2), (1, 4)), tuned[
        "models"
    ]


@needs_mpirun
@needs_horovod
def test_adasum_of_two_ranks_is_its_formula_tensor_by_tensor() -> None:
    adasum = found("horovod")["adasum"]
    assert adasum["gap"] < 1e-12 and "by Adasum, each tensor by itself" in adasum["model"]
