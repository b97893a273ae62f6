"""The cost of collectives compared with sums by hand; a fit finds the parameters that its points
were computed from."""

from __future__ import annotations

import pytest

from hvdtrain.errors import UserError
from hvdtrain.extras.bench.cost_model import (
    ALGORITHMS,
    Cluster,
    MeasuredStep,
    StepModel,
    comm_s,
    fit_step,
    halving_doubling_s,
    hierarchical_ring_s,
    hierarchical_tree_s,
    link_errors,
    read_links,
    ring_s,
    split_buckets,
    step_errors,
    step_s,
    tree_s,
)
from hvdtrain.extras.plan.meshes.link import BACKWARD, Link, MeasuredAllreduce, fit_link

SLOW = Link("slow", 0.5, 100.0)  # half a second a message, 100 bytes a second
FAST = Link("fast", 0.25, 1000.0)


@pytest.mark.parametrize(
    ("cost", "ranks", "seconds"),
    [
        (ring_s, 1, 0.0),
        (ring_s, 2, 2 * 0.5 + 8.0),  # of 800 bytes: two messages of 400, 4 s each
        (ring_s, 4, 6 * 0.5 + 6 * 2.0),  # six of 200
        (tree_s, 1, 0.0),
        (tree_s, 2, 2 * (0.5 + 8.0)),
        (tree_s, 8, 6 * (0.5 + 8.0)),  # three levels, up and down
        (tree_s, 5, 6 * (0.5 + 8.0)),
        (halving_doubling_s, 1, 0.0),
        (halving_doubling_s, 2, 2 * 0.5 + 8.0),
        (halving_doubling_s, 8, 6 * 0.5 + 2 * (4.0 + 2.0 + 1.0)),  # 400, 200, 100 bytes, twice
        (
            halving_doubling_s,
            5,
            4 * 0.5 + 2 * (4.0 + 2.0) + 2 * (0.5 + 8.0),
        ),  # four ranks, and the fifth's vector there and back
    ],
)
def test_cost_of_one_allreduce(cost, ranks: int, seconds: float) -> None:  # type: ignore[no-untyped-def]
    assert cost(ranks, 800, SLOW) == pytest.approx(seconds, rel=1e-12)


def test_two_levels() -> None:
    cluster = Cluster(FAST, SLOW, per_node=4)
    # 16 ranks, 800 bytes: inside six messages of 200 at 0.25 + 0.2 s; between four nodes six of 50
    # at 0.5 + 0.5 s
    assert hierarchical_ring_s(16, 800, cluster) == pytest.approx(6 * 0.45 + 6 * 1.0, rel=1e-12)
    # two levels inside at 0.25 + 0.8 s, two between at 0.5 + 8 s, up and down
    assert hierarchical_tree_s(16, 800, cluster) == pytest.approx(4 * 1.05 + 4 * 8.5, rel=1e-12)
    assert comm_s("ring", 4, [800], cluster) == pytest.approx(6 * 0.45, rel=1e-12), (
        "one node: its own link"
    )
    assert comm_s("ring", 16, [800], cluster) == pytest.approx(30 * (0.5 + 0.5), rel=1e-12), (
        "the slower link determines the time"
    )
    assert comm_s("ring", 16, [800, 800, 400], cluster) == pytest.approx(
        2 * 30 * 1.0 + 30 * 0.75, rel=1e-12
    ), "bucket after bucket"
    assert all(comm_s(algorithm, 1, [800], cluster) == 0 for algorithm in ALGORITHMS)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_one_node_has_no_hierarchy(ranks: int) -> None:
    cluster = Cluster(FAST, SLOW, per_node=8)
    assert hierarchical_ring_s(ranks, 800, cluster) == pytest.approx(
        ring_s(ranks, 800, FAST), rel=1e-12
    )
    assert hierarchical_tree_s(ranks, 800, cluster) == pytest.approx(
        tree_s(ranks, 800, FAST), rel=1e-12
    )


def test_nodes_of_one_rank() -> None:
    """Nothing happens inside a node."""
    assert hierarchical_ring_s(4, 800, Cluster(FAST, SLOW, 1)) == pytest.approx(
        ring_s(4, 800, SLOW), rel=1e-12
    )


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_fit_finds_the_link(ranks: int) -> None:
    made = Link("made", 3e-6, 12.5e9)
    points = [
        MeasuredAllreduce(size, ring_s(ranks, size, made))
        for size in (1, 1024, 2**20, 2**26, 10**8)
    ]
    found = fit_link(points, ranks)
    assert found.latency_s == pytest.approx(3e-6, rel=1e-9) and found.bytes_per_s == pytest.approx(
        12.5e9, rel=1e-9
    )
    assert max(map(abs, link_errors(points, ranks))) < 1e-9
    points[2] = MeasuredAllreduce(points[2].size_bytes, points[2].seconds * 2)
    assert link_errors(points, ranks)[2] == pytest.approx(-0.5, abs=1e-9), (
        "predicted from the other points"
    )


def test_latency_is_not_negative() -> None:
    """Times of 1 s for 1 byte and 3 s for 2 would ask for -1 s: the latency is 0, and 1/s the b of
    (b - 1)^2 + (2/3 b - 1)^2 least."""
    found = fit_link([MeasuredAllreduce(1, 1), MeasuredAllreduce(2, 3)], 2)
    assert found.latency_s == 0 and found.bytes_per_s == pytest.approx(
        (1 + 4 / 9) / (1 + 2 / 3), rel=1e-12
    )


def made_points(model: StepModel) -> list[MeasuredStep]:
    table: list[tuple[int, int, float]] = [
        (64, 1, 0),
        (32, 1, 0),
        (16, 1, 0),
        (64, 1, 2e-3),
        (32, 1, 2e-3),
        (64, 2, 5e-3),
        (16, 2, 5e-3),
        (64, 1, 9e-3),
    ]
    return [
        MeasuredStep(
            samples, oversubscription, comm, step_s(model, samples, comm, oversubscription)
        )
        for samples, oversubscription, comm in table
    ]


def test_fit_finds_the_step_model() -> None:
    model = StepModel(fixed_s=4e-3, per_sample_s=1e-3, contention=0.25, exposed=0.6)
    points = made_points(model)
    assert points[0].step_s == pytest.approx(0.068) and points[3].step_s == pytest.approx(
        0.068 * 1.25 + 1.2e-3
    )
    assert fit_step(points) == pytest.approx(model, rel=1e-9)
    assert len(step_errors(points)) == 8 and max(map(abs, step_errors(points))) < 1e-9
    late = [*points[:-1], points[-1]._replace(step_s=2 * points[-1].step_s)]
    assert step_errors(late)[-1] == pytest.approx(-0.5, abs=1e-9)
    assert step_errors(points[:4]) == []


def test_parameters_that_the_points_do_not_separate() -> None:
    same = fit_step([MeasuredStep(8, 1, 0, 0.4), MeasuredStep(8, 2, 0, 0.8)])
    assert same == pytest.approx(StepModel(0.0, 0.05, 0.0, 1.0)), (
        "equal numbers of samples: all time is per sample"
    )
    never = fit_step(
        [MeasuredStep(8, 1, 0.2, 0.7), MeasuredStep(4, 1, 0.2, 0.5), MeasuredStep(4, 1, 0.4, 0.6)]
    )
    assert never == pytest.approx(StepModel(0.2, 0.05, 0.0, 0.5), rel=1e-9), (
        "no rank ran alone: no contention is known"
    )
    alone = fit_step([MeasuredStep(8, 1, 0, 0.5), MeasuredStep(4, 1, 0, 0.3)])
    assert alone == pytest.approx(StepModel(0.1, 0.05, 0.0, 1.0), rel=1e-9), (
        "no communication: none is known to be hidden"
    )


def test_waiting_counts_as_contention() -> None:
    """1 s alone; steps grow by 3 times what the link needs: all communication is exposed, and the
    rest, 1.2 s and 1.4 s, is contention."""
    model = fit_step(
        [MeasuredStep(10, 1, 0, 1.0), MeasuredStep(10, 1, 0.1, 1.3), MeasuredStep(10, 1, 0.2, 1.6)]
    )
    # weighted by the squares of 1 / step
    factor = (1.2 / 1.3**2 + 1.4 / 1.6**2) / (1 / 1.3**2 + 1 / 1.6**2)
    assert model == pytest.approx(StepModel(0.0, 0.1, factor - 1, 1.0), rel=1e-9)


def test_backward_hides_at_most_its_own_length() -> None:
    model = StepModel(0.0, 1.0, 0.0, exposed=0.0)
    assert step_s(model, 3, 1.0) == pytest.approx(3.0), "backward hides all of it"
    assert step_s(model, 3, 10.0) == pytest.approx(3.0 + 10.0 - BACKWARD * 3)


def test_buckets() -> None:
    assert (
        split_buckets(10, 4) == [4, 4, 2]
        and split_buckets(8, 4) == [4, 4]
        and split_buckets(3, 4) == [3]
    )


def test_links_of_the_command_line() -> None:
    inside, between = read_links("nvlink:5us:300GB/s,ib:2us:25GB/s")
    assert inside == ("nvlink", pytest.approx(5e-6), 300e9) and between == (
        "ib",
        pytest.approx(2e-6),
        25e9,
    )
    assert read_links("eth:0.1ms:1.25GB/s") == (("eth", pytest.approx(1e-4), 1.25e9),) * 2
    with pytest.raises(UserError) as error:
        read_links("nvlink:5us:300GB")
    assert str(error.value) == (
        "cannot read the link 'nvlink:5us:300GB'\n  where: --links\n  fix: "
        "NAME:LATENCY:BANDWIDTH, inside a node and between nodes: "
        "--links nvlink:5us:300GB/s,ib:2us:25GB/s"
    )
    with pytest.raises(UserError, match="3 links, at most two are possible"):
        read_links("a:1us:1GB/s,b:1us:1GB/s,c:1us:1GB/s")
