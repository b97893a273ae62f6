"""plan --memory: its rows against arithmetic by hand, what fits, and what it refuses."""

from __future__ import annotations

import json

import pytest
from plan_command import refused
from ranks import needs_extra

from hvdtrain.__main__ import main
from hvdtrain.extras.plan.forecast.memory import read_size

MLP = ["data.name=digits", "model.name=mlp", "model.widths=[500]", "optim.name=adam"]
BYTES = 4 * (64 * 500 + 500 + 500 * 10 + 10)


def test_rows_by_hand(capsys: pytest.CaptureFixture[str]) -> None:
    """Adam: P of weights, P of gradients and 2 P of state; on 4 ranks a quarter of what is cut.
    Without blocks nothing is recomputed.

    guard.lost keeps a copy of what is whole, and of parts two of its own and two of the
    neighbour's.
    """
    assert (
        main(
            [
                "plan",
                *MLP,
                "guard.lost=shrink",
                "comm.engine=mpi",
                "--memory=8GiB",
                "--ranks",
                "2,4",
                "--json",
                "-",
            ]
        )
        == 0
    )
    found = json.loads(capsys.readouterr().out)["memory"]
    rows = {(row["ranks"], row["stage"]): row for row in found["rows"]}
    assert rows.keys() == {(ranks, stage) for ranks in (2, 4) for stage in range(4)}
    assert {row["recompute"] for row in found["rows"]} == {"none"}
    kinds = ("weights", "gradients", "optimizer_state")
    assert [rows[2, 0]["bytes"][kind] for kind in kinds] == [BYTES, BYTES, 2 * BYTES]
    assert [rows[4, 2]["bytes"][kind] for kind in kinds] == pytest.approx(
        [BYTES, BYTES / 4, BYTES / 2], abs=16
    )
    assert rows[4, 3]["bytes"]["optimizer_state"] == pytest.approx(BYTES / 2, abs=16)
    copies = [
        rows[ranks, stage]["bytes"]["copies"] for ranks, stage in ((2, 0), (2, 1), (4, 2), (4, 3))
    ]
    assert copies == pytest.approx([3 * BYTES, 5 * BYTES, 3 * BYTES, 0], abs=64)
    assert all(row["fits"] and row["largest_micro"] == row["micro"] for row in found["rows"])
    assert found["advice"].startswith("shard.stage=0 fits in 8.0 GiB on 4 ranks, with ")


@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_what_the_host_of_a_gpu_has(device: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A checkpoint of 3 P, with P of 4 x 4,000 x (64 + 1 + 10) + 40 bytes, and a buffer for the
    weights of 4,000 x 64."""
    words = [*MLP, "model.widths=[4000]", f"speed.device={device}", "--memory", "--ranks", "1"]
    assert main(["plan", *words]) == 0
    out = capsys.readouterr().out.replace("\n  ", " ")
    assert (
        ("the copies, at most 3 MiB, are on its host" in out)
        == ("a page-locked buffer, too, of 1 MiB:" in out)
        == (device == "auto")
    )


def test_stage_3_of_torchdist_has_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    """Its groups are torch's own, which a prediction has none of."""
    assert (
        main(["plan", *MLP, "comm.engine=torchdist", "--memory", "--ranks", "2", "--json", "-"])
        == 0
    )
    rows = {
        row["stage"]: row["bytes"] for row in json.loads(capsys.readouterr().out)["memory"]["rows"]
    }
    assert rows[3]["weights"] == pytest.approx(1.5 * BYTES, abs=64), (
        "its part, and the layers while they compute"
    )
    assert rows[3]["optimizer_state"] == pytest.approx(BYTES, abs=64)


@pytest.mark.parametrize("samples", ["32", "64", "80"])
def test_a_job_that_fits_has_a_largest_pass(
    samples: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where a smaller pass takes no less, since the update takes most."""
    words = [
        "plan",
        "data.name=digits",
        "model.name=mlp",
        f"batch.size={samples}",
        "--memory=16GiB",
        "--ranks",
        "1,2",
        "--json",
        "-",
    ]
    assert main(words) == 0
    rows = json.loads(capsys.readouterr().out)["memory"]["rows"]
    assert min(row["bytes_per_sample"] for row in rows) <= 0
    assert all(row["fits"] and row["largest_micro"] == row["micro"] for row in rows)


def test_where_nothing_fits_the_least_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *MLP, "--memory", "1MB", "--ranks", "1"]) == 0
    out = capsys.readouterr().out
    assert (
        "nothing fits in 1 MiB on 1 rank: shard.stage=0 needs " in out and out.count(" none\n") == 1
    )


@pytest.mark.parametrize(
    ("model", "key"),
    [
        pytest.param(
            "convnet model.norm=false model.dense=[8]",
            "parallel.dense=a",
            marks=needs_extra("dense"),
        ),
        pytest.param("mlp", "parallel.pipeline=2", marks=needs_extra("pipeline")),
    ],
)
def test_stages_that_are_refused_in_training_have_no_row(
    model: str, key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (
        f"plan data.name=digits model.name={model} {key} comm.engine=mpi --memory --ranks 2 "
        "--json -"
    )
    assert main(words.split()) == 0
    assert [row["stage"] for row in json.loads(capsys.readouterr().out)["memory"]["rows"]] == [
        0,
        1,
        2,
    ]


@pytest.mark.parametrize(
    ("text", "size"),
    [("16GiB", 16 * 2**30), ("1.5g", 1_500_000_000), ("500 MB", 500_000_000), ("7", 7)],
)
def test_sizes(text: str, size: int) -> None:
    assert read_size(text) == size


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--memory", "much"], "cannot read the size 'much'"),
        (
            ["framework=numpy", "model.name=linear", "--memory"],
            "the memory of framework=numpy cannot be predicted",
        ),
    ],
)
def test_refusals(arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert expected in refused(capsys, "data.name=digits", *arguments)
