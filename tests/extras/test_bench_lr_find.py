"""hvdtrain lr-find: rates and losses, the same on ranks; what it proposes; what it refuses."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ranks import mpirun, needs_extra, needs_mpirun

import hvdtrain
from hvdtrain.__main__ import main
from hvdtrain.extras.bench.lr_find import propose, smooth

JOB = [
    "model.name=linear",
    "batch.size=90",
    "speed.precision=fp64",
    "--from",
    "1e-4",
    "--to",
    "1",
    "--steps",
    "40",
    "--json",
    "-",
]


def test_a_curve(capsys: Any) -> None:
    assert main(["lr-find", *JOB]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["rates"] == pytest.approx(
        [1e-4 * 1e4 ** (step / 39) for step in range(40)], rel=1e-12
    )
    assert all(math.isfinite(loss) for loss in found["losses"]) and found["losses"][
        0
    ] == pytest.approx(math.log(10), abs=0.5)
    assert found["losses"][-1] < 0.5 < found["losses"][5]
    assert 0.01 < found["proposal"]["steepest"] <= found["proposal"]["lowest"] <= 1


@needs_mpirun
def test_ranks_find_the_same(capsys: Any, tmp_path: Path) -> None:
    assert main(["lr-find", *JOB]) == 0
    alone = json.loads(capsys.readouterr().out)
    done = mpirun(
        2,
        [
            "-m",
            "hvdtrain",
            "lr-find",
            *JOB,
            "comm.engine=mpi",
            "--png",
            str(tmp_path / "rates.png"),
        ],
    )
    assert done.returncode == 0, done
    together = json.loads(done.stdout.splitlines()[0])
    np.testing.assert_allclose(together["losses"], alone["losses"], rtol=0, atol=1e-12)
    assert together["proposal"] == alone["proposal"]
    assert (tmp_path / "rates.png").read_bytes().startswith(b"\x89PNG")


def test_it_ends_where_the_loss_grows(capsys: Any) -> None:
    assert main(["lr-find", "model.name=linear", "--to", "1e9", "--steps", "60"]) == 0
    said = capsys.readouterr().out
    assert "the steps after it are excluded" in said and "optim.base_lr=" in said


def test_the_proposal() -> None:
    """A loss that falls from 2 to 1 around a rate of 0.01, and grows from 1 on."""
    rates = [10 ** (-5 + 6 * step / 99) for step in range(100)]
    losses = [2 - 1 / (1 + (0.01 / rate) ** 2) + (0.5 * rate) ** 3 for rate in rates]
    found = propose(smooth(rates, losses))
    assert (
        found is not None
        and found.steepest == pytest.approx(0.01, rel=0.2)
        and 0.05 < found.lowest < 0.6
    )
    assert propose(smooth(rates, [1 + rate for rate in rates])) is None


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--from", "1", "--to", "0.1"], "--from 1 is not below --to 0.1"),
        (["--from", "no"], "'no' is not a learning rate"),
        (["--steps", "5"], "--steps 5 are too few for a curve"),
        (["model.name=convnt"], "unknown name"),
        (["comm.local_steps=4"], "which comm.local_steps=4 does not"),
    ],
)
def test_what_is_refused(words: list[str], what: str, capsys: Any) -> None:
    assert main(["lr-find", *words]) == 2
    assert what in capsys.readouterr().err


@needs_extra("pretrained")
def test_it_begins_with_the_weights_that_a_job_would(capsys: Any, tmp_path: Path) -> None:
    """Pretrained ones: at a rate that changes nothing the loss is that of the run that they come
    from."""
    run = hvdtrain.train(
        {"run": str(tmp_path / "run"), "epochs": 3},
        "model.name=linear",
        "batch.size=90",
        "optim.base_lr=0.1",
    )
    capsys.readouterr()
    words = ["--from", "1e-9", "--to", "1e-8", "--steps", "20", "--json", "-"]
    assert (
        main(
            ["lr-find", "model.name=linear", "batch.size=90", f"model.weights={run.folder}", *words]
        )
        == 0
    )
    out, err = capsys.readouterr()
    assert sum(json.loads(out)["losses"]) / 20 < 0.3 and "arrays are loaded" in err
