"""Ranks that have stages of a model give the losses, the evaluation, the state and the files of one
process, up to rounding."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from documented_events import check_documented
from pipeline_jobs_on_ranks import FEW, JOBS
from pool import on_ranks
from ranks import FULL, Job, in_full_rounds, mpirun, needs_extra, needs_mpirun, of_this_copy
from same_curve import check_same
from torch import nn
from waiting import wait_until

from hvdtrain.__main__ import main
from hvdtrain.comm.communicator import SingleProcessCommunicator
from hvdtrain.config.read import configure
from hvdtrain.core.extras import extras
from hvdtrain.errors import STALLED, UserError
from hvdtrain.extras.divided.features import mesh_lines
from hvdtrain.extras.pipeline.costs import agreed_seconds, samples_of_pass
from hvdtrain.extras.pipeline.cuts import first_units, planned_first_units
from hvdtrain.extras.pipeline.schedule import Seconds
from hvdtrain.extras.pipeline.stages import units_of
from hvdtrain.frameworks.torch.pipeline_unit import Unit
from hvdtrain.training.input import passes_of_step

slow = pytest.mark.slow
TWO = "parallel.pipeline=2"
SCHEDULES = [  # interleaved with an odd number of micro-batches, of which none or some are empty
    f"{TWO},parallel.schedule=interleaved,parallel.micro_batches=5",
    f"{TWO},parallel.schedule=gpipe,parallel.micro_batches=40,parallel.balance=seconds",
    f"{TWO},parallel.schedule=zero_bubble",
]
FOUR = [  # buckets so small that there are several
    f"{TWO},comm.bucket_mb=0.004",
    *(f"{TWO},{words}" for words in of_this_copy(["parallel.tensor=2"])),
    f"{TWO},shard.stage=1,comm.bucket_mb=0.004",
    f"{TWO},shard.stage=2,parallel.schedule=zero_bubble",
    "parallel.pipeline=4",
]


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, dict[str, dict]]:
    """Of few jobs or all, by name, when a test first asks for them."""
    return {}


def reference(known: dict[bool, dict[str, dict]], folder: Path, few: bool) -> dict[str, dict]:
    if few not in known:
        found = on_ranks("single", 1, "pipeline_jobs_on_ranks:curves", str(folder), [], few, False)[
            0
        ]
        known[few] = {name.partition(" / ")[0]: job for name, job in found.items()}
    return known[few]


@needs_mpirun
@pytest.mark.parametrize(
    ("engine", "size", "meshes", "words"),
    [
        pytest.param(
            "mpi", 2, [TWO], ["faulty", *["few"] * (not FULL)], marks=slow, id="mpi-2-all"
        ),
        pytest.param("mpi", 2, SCHEDULES, ["few"], marks=slow, id="mpi-2-schedules"),
        pytest.param(
            "mpi", 4, FOUR[1:3], ["few"], marks=[slow, pytest.mark.ranks4], id="mpi-4-two"
        ),
        *[
            pytest.param("mpi", 4, FOUR, ["few"], marks=[slow, pytest.mark.ranks4], id="mpi-4"),
            pytest.param("torchdist", 2, SCHEDULES[:1], ["few"], marks=slow, id="torchdist-2"),
            pytest.param(
                "torchdist",
                4,
                FOUR[:2],
                ["few"],
                marks=[slow, pytest.mark.ranks4],
                id="torchdist-4",
            ),
        ]
        * FULL,
    ],
)
def test_every_pipeline_is_one_process(
    one_process: dict, tmp_path: Path, engine: str, size: int, meshes: list[str], words: list[str]
) -> None:
    few = "few" in words
    faulty = "faulty" in words
    for folder in ("one", "ranks"):
        (tmp_path / folder).mkdir()
    one_of = reference(one_process, tmp_path / "one", few)
    found = on_ranks(
        engine, size, "pipeline_jobs_on_ranks:curves", str(tmp_path / "ranks"), meshes, few, faulty
    )[0]
    if "faulty" in words:
        difference = np.array(found.pop("faulty")["losses"]) - np.array(
            one_of["gpt, tied"]["losses"]
        )
        assert found.pop("altered") == ["", "ranks differ after step 1: p.tokens.weight[0:408]"]
        assert np.abs(difference).max() > 1e-3, (
            "gradients of the copies of a tied weight that are not added are noticed"
        )
    assert found.keys() == {
        f"{job} / {mesh}"
        for mesh in meshes
        for job in (*(FEW if "few" in words else JOBS), "files")
    }
    for name, job in found.items():
        one = one_of[name.partition(" / ")[0]]
        if name.startswith("files"):
            assert job == one and len(job) == 2, name
            continue
        check_same(name, job, one)


@needs_extra("tensor")
def test_the_picture_of_a_mesh_with_stages() -> None:
    parallel = configure(None, ["parallel.pipeline=2", "parallel.tensor=2"]).parallel
    assert mesh_lines(parallel, ["n1", "n1", "n1", "n1", "n2", "n2", "n2", "n2"]) == [
        "mesh    2 pipeline x 2 data x 2 tensor",
        "                  stage 0, tensor 0  stage 0, tensor 1  stage 1, tensor 0  stage 1, "
        "tensor 1",
        "        data 0    0 on n1            1 on n1            4 on n2            5 on n2",
        "        data 1    2 on n1            3 on n1            6 on n2            7 on n2",
    ]


@pytest.mark.parametrize(
    ("words", "passes"),
    [
        ("", 4),
        ("parallel.micro_batches=5", 5),
        ("batch.micro=8", 4),
        ("batch.micro=31", 1),
        ("parallel.schedule=gpipe", 4),
    ],
)
def test_how_many_micro_batches_a_step_has(words: str, passes: int) -> None:
    config = configure(None, ["parallel.pipeline=2", *words.split()])
    assert passes_of_step(config, 31, 31, 31) == passes


def sequential(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 4), *layers, nn.Linear(4, 3)).double()


class Scaled(nn.Sequential):
    """Its children one after the other are not the model."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 0.1 * super().forward(x)


class WithoutItsEnd(Scaled):
    def pipeline_units(self) -> list[Unit]:
        return [Unit(name, (layer,), layer) for name, layer in self.named_children()]


class GivesTwo(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x, x


class TakesTwo(nn.Module):
    def forward(self, x: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return x[0] + x[1]


def test_a_layer_that_is_there_twice_is_two_units() -> None:
    act = nn.ReLU()
    model = sequential(act, nn.Linear(4, 4).double(), act)
    units = units_of(model, "parallel.pipeline")
    assert [unit.name for unit in units] == ["0", "1", "2", "3", "4", "5"] and units[
        2
    ].call is units[4].call
    # gives what the model gives
    first_units(
        model,
        configure(None, ["parallel.pipeline=2"]),
        torch.ones(2, 3, 4, dtype=torch.float64),
        None,
    )


@pytest.mark.parametrize(
    ("model", "words", "message", "fix"),
    [
        (
            nn.Bilinear(2, 2, 2),
            "",
            "Bilinear does not define where it can be divided into stages",
            "a model with pipeline_units",
        ),
        (
            sequential(),
            "parallel.schedule=interleaved",
            "a model of 3 units cannot be divided into 4 stages",
            "at most 3 stages",
        ),
        (
            sequential(),
            "parallel.balance=2,2",
            "parallel.balance=.2, 2. has 4 units, but the model has 3: 0, 1, 2",
            "2 numbers with a sum of 3",
        ),
        (
            Scaled(nn.Linear(4, 3), nn.Linear(3, 3)).double(),
            "",
            "Scaled does not define where it can be divided",
            "a model with pipeline_units",
        ),
        (
            WithoutItsEnd(nn.Linear(4, 3), nn.Linear(3, 3)).double(),
            "",
            "units of WithoutItsEnd, .* return something else than",
            "pipeline_units",
        ),
        (
            sequential(GivesTwo(), TakesTwo()),
            "",
            "unit 2 of Sequential returns a tuple, which cannot be sent",
            "units that each return one tensor",
        ),
        (
            sequential(nn.BatchNorm1d(4)),
            "",
            "training changes the buffer 2.running_mean of Sequential",
            "a model without batch norm",
        ),
    ],
)
def test_a_model_that_cannot_be_cut_is_refused(
    model: nn.Module, words: str, message: str, fix: str
) -> None:
    x = torch.ones(2, 3, 4, dtype=torch.float64)
    before = {name: b.clone() for name, b in model.named_buffers()}
    with pytest.raises(UserError, match=message) as caught:
        first_units(model, configure(None, ["parallel.pipeline=2", *words.split()]), x, None)
    assert caught.value.fix and caught.value.fix.startswith(fix)
    assert all(torch.equal(b, before[name]) for name, b in model.named_buffers())


def test_stages_have_about_as_many_operations() -> None:
    wide = nn.Linear(4, 400), nn.Linear(400, 4)
    # flatten 12-4, 4-400, 400-4, 4-3
    model, config = (
        sequential(*wide),
        configure(None, ["parallel.pipeline=2"]),
    )
    assert first_units(model, config, torch.ones(2, 3, 4, dtype=torch.float64), None) == [0, 3]


@pytest.mark.parametrize(
    ("balance", "first"),
    [("operations", [0, 3]), ("seconds", [0, 1]), ("2,3", [0, 2]), ("[4, 1]", [0, 4])],
)
def test_where_a_model_is_cut_is_chosen(balance: str, first: list[int]) -> None:
    model = sequential(nn.Linear(4, 400), nn.Linear(400, 4))
    config = configure(None, ["parallel.pipeline=2", f"parallel.balance={balance}"])
    x = torch.ones(2, 3, 4, dtype=torch.float64)
    assert (
        first_units(model, config, x, lambda units: [Seconds(5, 9), *[Seconds(1, 2)] * 4]) == first
    )
    without_times = [0, 3] if balance == "seconds" else first
    assert (
        first_units(model, config, x, None)
        == planned_first_units(model, config, x)
        == without_times
    )


def test_a_wrong_balance_is_refused_in_a_prediction() -> None:
    config = configure(None, ["parallel.pipeline=2", "parallel.balance=2,2"])
    with pytest.raises(
        UserError, match="parallel.balance=.2, 2. has 4 units, but the model has 3: 0, 1, 2"
    ):
        planned_first_units(sequential(), config, torch.ones(2, 3, 4, dtype=torch.float64))


def test_measured_seconds_are_those_of_rank_0() -> None:
    """Of passes in training mode, with the samples of a micro-batch."""

    class Recorder(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            calls.append((len(x), self.training, torch.is_autocast_enabled("cpu")))
            return super().forward(x)

    class Second(SingleProcessCommunicator):
        """Rank 1, as rank 0 sends."""

        rank = 1

        def broadcast_object(self, x: object, root: int = 0) -> object:
            gathered.append(x)
            return from_rank_0.pop(0)

    calls: list[tuple] = []
    units = units_of(nn.Sequential(Recorder(4, 4)).eval(), "test")
    config = configure(None, ["parallel.pipeline=2", "batch.size=30", "parallel.micro_batches=4"])
    x = torch.ones(samples_of_pass(config, 2), 4)
    found = agreed_seconds(
        units, x, lambda device: torch.autocast("cpu", torch.bfloat16), SingleProcessCommunicator()
    )
    assert len(found) == 1 and min(found[0]) > 0 and set(calls) == {(4, True, True)}
    from_rank_0: list[object] = [([(1.0, 2.0)], None)]  # the seconds, and no failure
    gathered: list = []
    assert (
        agreed_seconds(units, x, lambda device: nullcontext(), Second()) == [Seconds(1.0, 2.0)]
        and len(set(calls)) == 1
    )
    from_rank_0[:] = [(None, UserError("it fails there", "parallel.balance"))]
    with pytest.raises(UserError, match="it fails there"):
        agreed_seconds(units, x, lambda device: nullcontext(), Second())
    First = type(
        "First", (Second,), {"rank": 0, "broadcast_object": lambda self, x: gathered.append(x) or x}
    )
    with pytest.raises(UserError, match="unit 0 failed while it was timed"):
        agreed_seconds(units, x[:, :3], lambda device: nullcontext(), First())
    assert isinstance(gathered[-1][1], UserError), "rank 0 sends it"
    assert (
        samples_of_pass(
            configure(None, ["parallel.pipeline=2", "batch.size=30", "batch.micro=7"]), 1
        )
        == 7
    )


@slow
@needs_mpirun
def test_stages_of_16_bits() -> None:
    """With dropout, of which stages draw other masks, they learn as one process in 32 bits; all
    agree on the steps that are left out."""
    found = on_ranks("mpi", 2, "pipeline_jobs_on_ranks:half")[0]
    loss = {
        name: found[name]["val"]["loss"] / found[name]["val"]["tokens"]
        for name in ("fp32", "bf16", "fp16")
    }
    assert loss["bf16"] == pytest.approx(loss["fp32"], rel=0.01) and loss["fp16"] == pytest.approx(
        loss["fp32"], rel=0.01
    ), loss
    assert loss["fp32"] < 2.4, "from ln 16 = 2.77"
    assert loss["bf16"] != loss["fp32"] != loss["fp16"], "not in 16 bits"
    first, last = found["overflow"]
    assert [step["passes of the last stage"] for step in first] == [0, 0, 0], (
        "rank 0 has seen no infinite number"
    )
    assert [step["passes of the last stage"] for step in last] == [4, 8, 12]
    for of_rank in found["overflow"]:
        assert [step["scale"] for step in of_rank] == [65536, 32768, 32768]
        assert [step["nonfinite"] for step in of_rank] == [0, 0, 0], (
            "the scale was too large: no step with bad numbers"
        )
        assert of_rank[1]["changed"] == ["s.loss scale steps"]
        assert {"p.fc1.weight", "p.head.bias", "s.fc1.weight.0", "s.head.bias.0"} <= {
            *of_rank[0]["changed"]
        } & {*of_rank[2]["changed"]}


@slow
@needs_mpirun
def test_a_model_without_units_is_refused_on_all_ranks(tmp_path: Path) -> None:
    words = ["model.name=wide_resnet", "parallel.pipeline=2", "comm.engine=mpi"]
    result = mpirun(2, ["-m", "hvdtrain", f"run={tmp_path / 'run'}", *words])
    assert (
        result.returncode == 2
        and result.stderr.count("does not define where it can be divided into stages") == 1
    ), result.stderr
    assert "Traceback" not in result.stderr


@slow
@needs_mpirun
@needs_extra("tensor")
@pytest.mark.ranks4
def test_a_job_in_a_mesh_says_who_waits(tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = (
        "model.name=mlp model.widths=[64,64,64] comm.engine=mpi parallel.tensor=2 "
        "parallel.pipeline=2 epochs=2 log.step_times=true"
    )
    result = mpirun(4, ["-m", "hvdtrain", *words.split(), f"run={run}"])
    assert result.returncode == 0, result.stderr
    assert re.search(
        r"stage [01] is slowest: [\d.]+ ms of own work a step, stage [01] [\d.]+; stage [01] "
        r"waits most: \d+%",
        result.stdout,
    )
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    check_documented(events)
    start = events[0]
    assert start["mesh"] == {"pipeline": 2, "data": 1, "tensor": 2}
    assert start["coordinates_of_rank"] == [[0, 0, 0], [0, 0, 1], [1, 0, 0], [1, 0, 1]]
    for event in events:
        if event["kind"] in ("step", "step_times"):
            assert len(event["stage_work_ms"]) == 2 and event["phase_ms"]["backward"] > 0
            ranks = event["work_ms"]
            assert (
                ranks[0] <= ranks[1] <= ranks[2]
                and 0 < ranks[2] < sum(event["phase_ms"].values()) * 4
            ), "phases are means over 4 ranks"
        if event["kind"] == "epoch":
            waited = zip(event["rank_waiting_ms"], event["rank_communication_ms"], strict=True)
            assert all(0 < waiting < communication for waiting, communication in waited)
    passes = [event for event in events if event["kind"] == "passes"][-1]
    assert passes["passes_of_ranks"] == [0, 2]
    done = [
        {(kind, micro): (wait, begin, end) for kind, stage, micro, wait, begin, end in rows}
        for rows in passes["passes"]
    ]
    assert [len(of_rank) for of_rank in done] == [8, 8]
    for micro in range(4):  # what a stage takes, another one has made
        assert done[0]["forward", micro][2] <= done[1]["forward", micro][2]
        assert done[1]["backward", micro][1] <= done[0]["backward", micro][2]
    assert all(wait <= begin <= end for of_rank in done for wait, begin, end in of_rank.values())
    if "report" not in extras():
        return
    assert main(["report", str(run)]) == 0
    page = (run / "report.html").read_text()
    for text in (
        "2 pipeline x 1 data x 2 tensor",
        "<h2>Mesh</h2>",
        "<h2>Stages</h2>",
        "Passes of a pipeline",
        "Time of each rank",
    ):
        assert text in page, text
    assert len(page) < 1_000_000 and "<script" not in page


@slow
@needs_mpirun
@pytest.mark.parametrize("hang", [True, *[False] * FULL])
def test_a_rank_in_a_pass_is_named_with_its_place(tmp_path: Path, hang: bool) -> None:
    words = [
        "model.name=faulty:Staged",
        f"model.hang={hang}",
        "model.bad_step=50",
        "epochs=100",
        "comm.engine=mpi",
    ]
    words += ["guard.stall_s=3"] * hang
    env = {
        "PYTHONPATH": os.pathsep.join(
            [str(Path(__file__).parents[2]), str(Path(__file__).parents[1] / "support")]
        )
    }
    result = mpirun(
        2, ["-m", "hvdtrain", *words, "parallel.pipeline=2", f"run={tmp_path / 'run'}"], env=env
    )
    place = rf"rank 1 on {socket.gethostname()} \(stage 1, data 0\)"
    doing = r"in the forward pass of micro-batch 1 in stage 1"
    if hang:
        assert result.returncode == STALLED, result.stderr
        assert re.search(
            rf"behind:\n  {place}, pid \d+: step, epoch 0, step 12, for .*, {doing}\n",
            result.stderr,
        ), result.stderr
        waiting = (
            "waiting: rank 0 at step 12, epoch 0: step, (forward|backward) pass of micro-batch . "
            "in stage 0, waits for stage 1 "
        )
        assert re.search(rf"{waiting}\(rank 1\)\n", result.stderr), result.stderr
    else:
        assert result.returncode == 1, result.stderr
        assert re.search(rf"\n{place}, {doing}: the error above ends the job\n", result.stderr), (
            result.stderr
        )


@slow
@needs_mpirun
@pytest.mark.parametrize("engine", ["mpi", "torchdist"])
@in_full_rounds
def test_a_killed_rank_of_a_pipeline_ends_all(tmp_path: Path, engine: str) -> None:
    words = [
        "-m",
        "hvdtrain",
        "model.name=mlp",
        "parallel.pipeline=2",
        "epochs=1000000",
        "log.every_s=0.5",
    ]
    with Job(2, [*words, f"comm.engine={engine}", f"run={tmp_path / 'run'}"], is_warm=True) as job:
        wait_until(lambda: job.output().count("\n") > 12, "it trains")
        os.kill(job.pids()[0], signal.SIGKILL)
        result = job.wait()
        wait_until(lambda: not job.processes(), "all processes are gone")
    assert result.returncode not in (0, 124)
