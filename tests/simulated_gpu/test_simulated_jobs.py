"""Jobs on simulated GPUs: they compute what the CPU does, without waits, races or wrong devices."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from ranks import needs_mpirun
from simulated_gpu.build import compiler
from simulated_gpu.table import ALONE, EACH, ON_TWO, WARM_UP, WINDOW

from hvdtrain.frameworks.footprint import KINDS
from hvdtrain.frameworks.torch.device_digest import SPAN_WORDS

pytestmark = [
    pytest.mark.simulated_gpu,
    pytest.mark.skipif(compiler() is None, reason="no C++ compiler: g++ builds the simulated GPU"),
]
ROUNDED = 1.02  # to 512 bytes for each tensor
# of plan --memory, which predicts CUDA's attention: the simulated one keeps each matrix of weights
ATTENTION = 1.2
DIGEST_BYTES = 36  # for each of a span's words, while its digest is computed


@pytest.mark.parametrize("name", ALONE)
def test_a_job_of_one_process(alone: dict[str, Any], name: str) -> None:
    found = alone["jobs"][name]
    assert "error" not in found, found["error"]
    gpu = found["gpu"]
    assert not gpu.get("failures"), gpu["failures"]
    assert len(gpu["losses"]) > 2
    assert gpu["losses"] == pytest.approx(found["cpu"]["losses"], rel=1e-12)
    assert gpu["val"] == {
        name: pytest.approx(value, rel=1e-11) for name, value in found["cpu"]["val"].items()
    }
    assert gpu["races"] == []
    assert {device for _, device in gpu["devices"]} == {0}
    assert sum(gpu["waits"].values()) == ALONE[name].waits, gpu["waits"]


@needs_mpirun
@pytest.mark.parametrize(("name", "engine"), EACH)
def test_a_job_of_two_ranks(
    alone: dict[str, Any], on_two: dict[str, Any], name: str, engine: str
) -> None:
    row = ON_TWO[name]
    expected = alone["jobs"][row.like]["cpu"]["losses"]
    ranks = on_two[engine][name]
    for rank, found in enumerate(ranks):
        assert not found.get("failures"), found["failures"]
        assert found["losses"] == pytest.approx(expected, rel=1e-12)
        assert found["races"] == []
        assert {device for _, device in found["devices"]} == {rank}, found["devices"]
        if row.kind != "calls":  # whose process sets are others on each rank
            assert found["calls"] == ranks[0]["calls"]
        assert sum(found["waits"].values()) == row.waits[engine], found["waits"]


@needs_mpirun
@pytest.mark.parametrize(
    ("name", "engine"),
    [("pipeline", "torchdist"), ("a loop of tokens, pipeline", "torchdist")],
)
def test_what_one_gpu_sends_the_other_one_receives(
    on_two: dict[str, Any], name: str, engine: str
) -> None:
    """In the same order, by NCCL."""
    ranks = [found["messages"] for found in on_two[engine][name]]
    for rank, own in enumerate(ranks):
        sent = [rest for kind, *rest in own if kind == "send"]
        taken = [rest for kind, *rest in ranks[1 - rank] if kind == "recv"]
        assert sent and {peer for _, peer, *_ in sent} == {1 - rank}
        assert {peer for _, peer, *_ in taken} == {rank}
        assert [(group, *rest) for group, _, *rest in sent] == [
            (group, *rest) for group, _, *rest in taken
        ]


@needs_mpirun
@pytest.mark.parametrize(
    ("name", "engine"),
    [
        (name, engine)
        for name, engine in EACH
        if engine == "torchdist" and ON_TWO[name].kind in ("train", "memory")
    ],
)
def test_what_the_host_sends_to_other_ranks_in_a_step(
    on_two: dict[str, Any], name: str, engine: str
) -> None:
    """With NCCL, which the host starts and does not wait for."""
    for found in on_two[engine][name]:
        sent = [after - before for before, after in found["exchanges"][WARM_UP:]]
        assert sent == [ON_TWO[name].exchanges] * len(sent) and sent, found["exchanged"]


@needs_mpirun
@pytest.mark.parametrize(("name", "engine"), [("four steps without a wait", "torchdist")])
def test_the_host_sends_nothing_between_sync_points(
    on_two: dict[str, Any], name: str, engine: str
) -> None:
    for found in on_two[engine][name]:
        steps = found["exchanges"]
        between = [after[0] - before[1] for before, after in itertools.pairwise(steps)]
        at_sync_points = between[WINDOW - 1 :: WINDOW]
        assert len(at_sync_points) > 1 and all(at_sync_points)
        assert sum(between) == sum(at_sync_points), found["exchanged"]


@pytest.mark.parametrize("name", [name for name, job in ALONE.items() if job.kind == "memory"])
def test_the_memory_of_one_process_is_what_plan_says(alone: dict[str, Any], name: str) -> None:
    check_memory(alone["jobs"][name]["gpu"], "gpt" in name)


@needs_mpirun
@pytest.mark.parametrize(
    ("name", "engine"), [(name, engine) for name, engine in EACH if ON_TWO[name].kind == "memory"]
)
def test_the_memory_of_two_ranks_is_what_plan_says(
    on_two: dict[str, Any], name: str, engine: str
) -> None:
    """Of rank 0, whose parts are the largest."""
    row = ON_TWO[name]
    check_memory(on_two[engine][name][0], "gpt" in row.like, row.start)


def check_memory(found: dict[str, Any], has_attention: bool, start: float = ROUNDED) -> None:
    predicted = found["predicted"]
    step = sum(predicted[kind] for kind in KINDS) + predicted["inputs"]
    assert 1 <= found["peak_bytes"] / step < (ATTENTION if has_attention else ROUNDED)
    stays = sum(predicted[kind] for kind in ("weights", "optimizer_state", "buffers"))
    # of the digest of the largest array, on the GPU
    digest = DIGEST_BYTES * min(found["start"]["largest_words"], SPAN_WORDS)
    assert 1 <= found["start"]["peak_bytes"] / stays < start + digest / stays
