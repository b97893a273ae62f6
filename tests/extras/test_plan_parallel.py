"""plan --parallel: seconds against arithmetic by hand, which meshes there are, what it prints, and
what it refuses."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import pytest
from plan_command import refused
from ranks import needs_extra

from hvdtrain.__main__ import main
from hvdtrain.comm.counted import Kind, Moved
from hvdtrain.config.read import configure
from hvdtrain.extras.plan.meshes.link import IN_PARTS, Link
from hvdtrain.extras.plan.meshes.machine import Machine, machine_of, read_link
from hvdtrain.extras.plan.meshes.meshes import (
    MeshShape,
    meshes,
    moved_s,
    step_time,
    with_mesh,
    without_mesh,
)
from hvdtrain.frameworks.footprint import Footprint, PlannedWork

INSIDE = Link("inside", 1e-3, 1e6)
BETWEEN = Link("between", 1e-2, 1e5)
TWO_NODES = Machine(1e9, 1e8, 1e7, INSIDE, BETWEEN, per_node=2, in_parts=3.0, assumed=())
MLP = ["data.name=digits", "model.name=mlp", "model.widths=[63,64]"]
MACHINE = ["--gflops", "1", "--ranks", "2", "--ranks-per-node", "1", "--between", "1MB/s,1ms"]


def moved(kind: Kind, size: int, *ranks: int, name: str = "gradient.0") -> Moved:
    return Moved(kind, name, ranks, size, 0)


def test_seconds_of_collectives_by_hand() -> None:
    """1000 bytes. Groups (0, 2) and (1, 3) share a node's link, so each has half of it; the ring of
    all four crosses it once."""
    cases = [
        (moved("allreduce", 1000, 0, 1), 2 * (1e-3 + 500 / 1e6)),
        (moved("allreduce", 1000, 0, 2), 2 * (1e-2 + 500 / 0.5e5)),
        (moved("allreduce", 1000, 0, 1, 2, 3), 6 * (1e-2 + 250 / 1e5)),
        (moved("reduce-scatter", 1000, 0, 1), 1e-3 + 500 / 1e6),
        (moved("all-gather", 1000, 0, 1, 2, 3), 3.0 * 3 * (1e-2 + 250 / 1e5)),
        (moved("broadcast", 1000, 0, 1, 2, 3), 2 * (1e-2 + 1000 / 1e5)),
        (moved("message", 1000, 1, 3), 1e-2 + 1000 / 0.5e5),
    ]
    for each, expected in cases:
        assert moved_s(each, TWO_NODES) == pytest.approx(expected), each


def work(*sent: Moved, flops: float = 3e8, passes: int = 1) -> PlannedWork:
    return PlannedWork(Footprint(), flops, 1e7, int(1e6), passes, sent)


def test_seconds_of_a_step_by_hand() -> None:
    """0.3 s of products, 0.1 of other operations, 0.1 of the update; two buckets of 0.04 s, of
    which one hides behind backward."""
    gradients = (
        moved("allreduce", 18_000, 0, 1, name="gradient.0"),
        moved("allreduce", 18_000, 0, 1, name="gradient.1"),
    )
    both = 2 * 2 * (1e-3 + 9000 / 1e6)
    config = configure(None, [])
    assert step_time(
        config, [work(*gradients)], TWO_NODES, overlaps=False
    ).seconds == pytest.approx(0.5 + both)
    hidden = step_time(config, [work(*gradients)], TWO_NODES, overlaps=True)
    assert hidden.seconds == pytest.approx(
        0.5 + both / 2
    ) and hidden.communication_s == pytest.approx(both)
    in_passes = work(moved("allreduce", 18_000, 0, 1, name="tensor.blocks.0.fc2.forward"))
    assert step_time(config, [in_passes], TWO_NODES, overlaps=True).seconds == pytest.approx(
        0.5 + both / 2
    )


@needs_extra("pipeline")
def test_seconds_of_a_pipeline_by_hand() -> None:
    """gpipe, 2 stages, 2 micro-batches, each 0.2 s of passes, a third of it forward. Each message
    takes 0.02 s: forward 3 / 15 + 0.02, backward 6 / 15 + 0.02, then the update of 0.1 s."""
    config = configure(None, ["parallel.pipeline=2", "parallel.schedule=gpipe"])
    there = [
        moved("message", 500, 0, 2, name=name)
        for name in ("pipeline.1.form", "pipeline.1", "pipeline.1")
    ]
    back = [moved("message", 500, 2, 0, name="pipeline.1.gradient")] * 2
    found = step_time(
        config, [work(*there[1:], passes=2), work(*back, passes=2)], TWO_NODES, overlaps=False
    )
    assert found.seconds == pytest.approx(3 * 0.2 + 2 * 0.02 + 0.1)
    assert found.bubble == pytest.approx(1 - 0.4 / 0.64) and found.communication_s == pytest.approx(
        0.04
    )


@needs_extra("pipeline")
@needs_extra("tensor")
def test_which_meshes_there_are() -> None:
    words = [mesh.words for mesh in meshes(4, has_dense_part=True)]
    assert words[:7] == [
        "",
        *(f"shard.stage={n}" for n in (1, 2, 3)),
        *(f"parallel.dense={scheme}" for scheme in "abc"),
    ]
    tensor = [
        "parallel.tensor=2",
        *(f"parallel.tensor=2 shard.stage={n}" for n in (1, 2, 3)),
        "parallel.tensor=4",
    ]
    pipeline = ["parallel.pipeline=2", *(f"parallel.pipeline=2 shard.stage={n}" for n in (1, 2))]
    assert words[7:] == [
        *tensor,
        *pipeline,
        "parallel.pipeline=2 parallel.tensor=2",
        "parallel.pipeline=4",
    ]
    assert [mesh.words for mesh in meshes(1, has_dense_part=False)] == [""]
    every = {mesh.words: mesh for mesh in meshes(4, has_dense_part=False, has_positions=True)}
    of_positions = [found for found in every if "parallel.context" in found]
    assert of_positions == [
        *("parallel.context=2", *(f"parallel.context=2 shard.stage={n}" for n in (1, 2, 3))),
        *("parallel.context=4", *(f"parallel.context=4 shard.stage={n}" for n in (1, 2, 3))),
        "parallel.context=2 parallel.tensor=2",
        *(f"parallel.context=2 parallel.tensor=2 shard.stage={n}" for n in (1, 2, 3)),
    ]
    assert every["parallel.context=2"].name == "2 data x 2 context"
    assert every["parallel.context=2 parallel.tensor=2"].data == 1


def test_links_and_measurements(tmp_path: Path) -> None:
    assert read_link("1.25GB/s,30us", "--between", BETWEEN) == Link(
        "between", pytest.approx(30e-6), 1.25e9
    )
    assert read_link("10MB/s", "--inside", INSIDE) == Link("inside", 1e-3, 10e6)
    step = {
        "phases_ms": {"forward": 100, "backward": 300, "update": 50},
        "gflop_per_step_of_a_rank": 0.6,
        "matmul_gflop_per_s": 2,
        "ranks": 4,
    }
    rows = [
        {
            "method": method,
            "bytes": size,
            "quartiles_s": [0, factor * 6 * (1e-3 + size / 4 / 1e6), 0],
        }
        for size in (2**12, 2**20, 2**22)
        for method, factor in (("allreduce", 1.0), (IN_PARTS, 1.5))
    ]
    (tmp_path / "step.json").write_text(json.dumps(step))
    (tmp_path / "links.json").write_text(
        json.dumps({"ranks": 4, "hosts": {"a": {}, "b": {}}, "rows": rows})
    )
    measured = f"{tmp_path / 'step.json'},{tmp_path / 'links.json'}"
    options = argparse.Namespace(
        measured=measured, gflops=None, inside=None, between=None, ranks_per_node=2
    )
    found = machine_of(options, 4, 1000, work(flops=0.3e9))
    assert found.flops_per_s == pytest.approx(2e9), "products: 0.3 s of 0.4"
    assert found.touched_bytes_per_s == pytest.approx(2 * 1e7 / 0.1), (
        "the measured step is twice the planned one"
    )
    assert (found.updated_bytes_per_s, found.in_parts) == (
        pytest.approx(20_000),
        pytest.approx(1.5),
    )
    assert found.between[1:] == (pytest.approx(1e-3), pytest.approx(1e6))


@needs_extra("tensor")
def test_a_plan_names_what_cannot_be(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--parallel", *MLP, "optim.name=adam", *MACHINE, "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    rows = {tuple(row["words"]): row for row in found["meshes"]}
    seconds = [row["seconds"] for row in found["meshes"]]
    assert seconds == sorted(seconds) and found["advice"].startswith("take ")
    gradients = 4 * (64 * 63 + 63 + 63 * 64 + 64 + 64 * 10 + 10)
    assert rows[()]["sent_bytes"] == pytest.approx(gradients, abs=100), (
        "an allreduce; numbers of a step's state beside it"
    )
    assert rows["shard.stage=1",]["memory_bytes"] < rows[()]["memory_bytes"]
    assert rows["shard.stage=1",]["compute_s"] < rows[()]["compute_s"], (
        "the passes are the same; the update is of half of the weights"
    )
    excluded = {tuple(each["words"]): each["reason"] for each in found["excluded"]}
    assert "63" in excluded["parallel.tensor=2",]


@needs_extra("pipeline")
def test_pipelines_have_the_balance_of_the_job() -> None:
    """A list where it has a number for each stage."""
    original = configure(None, ["parallel.balance=5,1"])
    plain = without_mesh(original, 4)
    found = [
        with_mesh(plain, MeshShape(4 // n, 1, n, 0, "none"), original).parallel.balance
        for n in (1, 2, 4)
    ]
    assert found == ["operations", [5, 1], "operations"]
    measured = configure(None, ["parallel.balance=seconds"])
    assert (
        with_mesh(plain, MeshShape(2, 1, 2, 0, "none"), measured).parallel.balance == "operations"
    )


@needs_extra("pipeline")
def test_what_is_assumed_of_a_balance(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--parallel", *MLP, *MACHINE, "parallel.balance=seconds"]) == 0
    assert " stages are cut by operations; parallel.balance=seconds measures" in " ".join(
        capsys.readouterr().out.split()
    )


@needs_extra("pipeline")
def test_what_does_not_fit_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--parallel", *MLP, "stop.steps=1", *MACHINE, "--memory", "1MB"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "no mesh fits: more ranks" in out and "excluded 2 data" in out
    assert (
        " of the 0 MiB that a rank has beside libraries and data assumed a rank computes 1 "
        "GFLOP/s (--gflops)" in out
    )


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--ranks", "2,4"], "plan --parallel compares meshes of one number of ranks"),
        (["--gflops", "fast"], "fast is not a speed"),
        (["--between", "fast"], "cannot read the link 'fast'"),
        (["--ranks-per-node", "0"], "0 is not a number of ranks"),
        (
            ["--measured", "/nowhere/step.json"],
            "cannot read /nowhere/step.json: No such file or directory",
        ),
        (
            ["--measured", __file__],
            "is not a result of bench step, or of bench allreduce on 2 ranks or more",
        ),
        (["framework=numpy", "model.name=linear"], "framework=numpy has no meshes to plan"),
    ],
)
def test_refusals(arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert expected in refused(capsys, "--parallel", "data.name=digits", *arguments)


@pytest.mark.parametrize(
    "odd",
    [
        {"rows": [], "hosts": ["a"], "ranks": 2},
        {
            "rows": [{"method": "allreduce", "bytes": 8, "quartiles_s": [1]}],
            "hosts": ["a"],
            "ranks": 2,
        },
        {
            "phases_ms": {"forward": 0, "backward": 0, "update": 1},
            "gflop_per_step_of_a_rank": 1,
            "matmul_gflop_per_s": 1,
            "ranks": 1,
        },
        {
            "phases_ms": {"forward": 1, "backward": 1, "update": 0},
            "gflop_per_step_of_a_rank": 1,
            "matmul_gflop_per_s": 1,
            "ranks": 1,
        },
        {
            "phases_ms": {"forward": 1, "backward": 1, "update": 1},
            "gflop_per_step_of_a_rank": math.inf,
            "matmul_gflop_per_s": 1,
            "ranks": 1,
        },
        {
            "phases_ms": {"forward": math.nan, "backward": 1, "update": 1},
            "gflop_per_step_of_a_rank": 1,
            "matmul_gflop_per_s": 1,
            "ranks": 1,
        },
    ],
)
def test_odd_measurements_are_refused(
    odd: dict, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "odd.json"
    file.write_text(json.dumps(odd))
    found = refused(capsys, "--parallel", *MLP, *MACHINE[2:], "--measured", str(file))
    assert "is not a result of bench step, or of bench allreduce" in found


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--parallel", "--png", "q.png"], "plan --parallel does not read --png"),
        (
            ["--parallel", "--parallel-picture", "p.png"],
            "plan --parallel does not read --parallel-picture",
        ),
        *(
            pytest.param(
                ["--pipeline", option],
                f"plan --pipeline does not read {option}",
                marks=needs_extra("pipeline"),
            )
            for option in ("--memory", "--parallel")
        ),
        (["--gflops", "3"], "plan without --parallel does not read --gflops"),
    ],
)
def test_options_of_another_plan_are_refused(
    arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert expected in refused(capsys, *arguments)
