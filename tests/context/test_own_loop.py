"""A loop of 15 lines on 1, 2 and 3 ranks, by every strategy; killed or stopped, and resumed on
another number of ranks: equal to 1e-12."""

from __future__ import annotations

import itertools
import json
import re
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from own_loop import SCRIPT, STEPS, assert_equal
from own_ways_on_ranks import plain_counted
from pool import alone
from ranks import (
    FULL,
    HIGHEST_STAGE,
    mpirun,
    needs_extra,
    needs_horovod,
    needs_mpirun,
    of_this_copy,
    python,
)
from rotation import rows_of_today


def trained(folder: Path, size: int, *arguments: str, code: int = 0) -> dict[str, Any]:
    """The result of the loop in this folder; size: ranks, 1 without a launcher."""
    out = folder / "out.json"
    words = [SCRIPT, str(out), *arguments, f"run={folder / 'run'}"]
    done = mpirun(size, words) if size > 1 else python(words)
    assert done.returncode == code, done.stdout + done.stderr
    result: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
    return result


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return trained(tmp_path_factory.mktemp("straight"), 1)


def by_hand() -> tuple[list[float], float]:
    """The losses of the loop's first five batches and its last rate, computed in numpy and with the
    trainer's sampler alone."""
    import torch

    from hvdtrain.data.sampler import positions_of_rank

    x = np.random.default_rng(0).uniform(-1, 1, (100, 3))
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)
    ).double()
    w1, b1, w2, b2 = (p.detach().numpy().copy() for p in net.parameters())
    momentum = [np.zeros_like(w) for w in (w1, b1, w2, b2)]
    losses = []
    for step in range(5):
        rows = positions_of_rank(7 * step, 7, 0, 1, 100, 1).samples
        inputs = x[rows]
        y = x[rows].prod(1)
        hidden = np.tanh(inputs @ w1.T + b1)
        error = (hidden @ w2.T + b2)[:, 0] - y
        losses.append(float((error**2).mean()))
        of_output = 2 * error[:, None] / 7
        of_hidden = of_output @ w2 * (1 - hidden**2)
        gradients = (of_hidden.T @ inputs, of_hidden.sum(0), of_output.T @ hidden, of_output.sum(0))
        momentum = [0.9 * m + g for m, g in zip(momentum, gradients, strict=True)]
        w1, b1, w2, b2 = (w - 0.2 * m for w, m in zip((w1, b1, w2, b2), momentum, strict=True))
    return losses, 0.2 / 4


def test_the_loop_computes_what_is_computed_by_hand(straight: dict[str, Any]) -> None:
    losses, rate = by_hand()
    assert [straight["losses"][f"{step}"] for step in range(1, 6)] == pytest.approx(
        losses, rel=1e-12
    )
    assert (straight["steps"], straight["lr"], straight["began"]) == (STEPS, rate, 0)
    assert straight["notes"] == [STEPS - 1, STEPS]
    assert straight["losses"][f"{STEPS}"] < straight["losses"]["1"]


WAYS = [
    pytest.param(3, ["comm.engine=mpi"], id="3-buckets"),
    pytest.param(
        2, ["comm.engine=horovod"], id="2-horovod", marks=[pytest.mark.slow, needs_horovod]
    ),
    *[
        pytest.param(2, ["comm.engine=mpi", "shard.stage=1"], id="2-zero1", marks=pytest.mark.slow),
        pytest.param(
            3, ["comm.engine=torchdist", "shard.stage=2"], id="3-zero2", marks=pytest.mark.slow
        ),
        pytest.param(3, ["comm.engine=mpi", HIGHEST_STAGE], id="3-zero3", marks=pytest.mark.slow),
        pytest.param(
            2, ["comm.engine=torchdist", "comm.reduce=ddp"], id="2-ddp", marks=pytest.mark.slow
        ),
    ]
    * FULL,
]


@needs_mpirun
@pytest.mark.parametrize(("size", "arguments"), WAYS)
def test_any_number_of_ranks_by_any_strategy(
    tmp_path: Path, straight: dict[str, Any], size: int, arguments: list[str]
) -> None:
    found = trained(tmp_path, size, *arguments)
    assert_equal(found, straight)
    assert found["own_numbers"] == (21 if "shard.stage=3" in arguments else 41), (
        "of 8 x 3, 8, 1 x 8 and 1: the first 3, 3, 1 and 1 rows"
    )


@needs_mpirun
@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after", "arguments"),
    [
        (3, 2, ["comm.engine=torchdist", HIGHEST_STAGE]),
        *[
            (3, 1, ["comm.engine=mpi"]),
            (2, 3, ["comm.engine=mpi", "shard.stage=1"]),
            (1, 2, list[str]()),
        ]
        * FULL,
    ],
)
def test_killed_and_resumed_on_another_number_of_ranks(
    tmp_path: Path, straight: dict[str, Any], before: int, after: int, arguments: list[str]
) -> None:
    """After step 27 the newest checkpoint is of step 20: later steps are computed again."""
    code = 128 + signal.SIGKILL if before > 1 else -signal.SIGKILL
    trained(tmp_path, before, "--kill", "27", f"{before - 1}", *arguments, code=code)
    found = trained(tmp_path, after, *arguments)
    assert found["began"] == 20
    assert_equal(found, straight)


@needs_mpirun
@pytest.mark.slow
def test_a_signal_to_one_rank_stops_all_at_the_same_step(
    tmp_path: Path, straight: dict[str, Any]
) -> None:
    found = trained(tmp_path, 2, "--signal", "11", "1", "comm.engine=mpi", code=75)
    assert (found["began"], found["steps"]) == (0, 15)
    found = trained(tmp_path, 1)
    assert found["began"] == 15
    assert_equal(found, straight)
    events = [
        json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    ]
    assert [event["kind"] for event in events if event["kind"] in ("start", "stop", "end")] == [
        "start",
        "stop",
        "start",
        "end",
    ]
    stop = next(event for event in events if event["kind"] == "stop")
    assert (stop["step"], stop["exit_code"]) == (15, 75) and stop["reason"] in (
        "SIGUSR2",
        "a signal on another rank",
    )


@needs_mpirun
def test_uneven_shares_on_ranks_and_one_without_samples(tmp_path: Path) -> None:
    done = mpirun(3, alone("context_on_ranks:main", str(tmp_path / "run"), "none"))
    assert done.returncode == 0 and "all as computed by hand" in done.stdout, (
        done.stdout + done.stderr
    )


@needs_mpirun
@pytest.mark.slow
@pytest.mark.parametrize(
    ("mistake", "code", "text"),
    [
        (
            "names",
            2,
            "hvdtrain: rank 0 has logged expected, loss, rank 1 expected, loss, only_rank_1\n  "
            "where: ctx.log()",
        ),
        *[("means", 2, "hvdtrain: rank 0 gives accuracy, loss, rank 1 loss\n  where: ctx.mean()")]
        * FULL,
        *[("raise", 1, "ValueError: of rank 1\nrank 1 on ")] * FULL,
    ],
)
def test_a_mistake_of_one_rank_ends_all_with_one_message(
    tmp_path: Path, mistake: str, code: int, text: str
) -> None:
    done = mpirun(3, alone("context_on_ranks:main", str(tmp_path / "run"), mistake))
    assert done.returncode == code and text in done.stderr, done.stderr
    assert done.stderr.count("Traceback") == (mistake == "raise") and done.stderr.count(
        "has logged"
    ) == (mistake == "names")


@needs_mpirun
@pytest.mark.slow
def test_an_exception_outside_of_a_with_block_ends_all_ranks(tmp_path: Path) -> None:
    script = tmp_path / "raises.py"
    script.write_text(
        "import hvdtrain as ht\nctx = ht.init('comm.engine=mpi')\nif ctx.rank:\n    raise "
        "ValueError('mine')\nctx.mean({'a': 1})\n"
    )
    done = mpirun(2, [str(script)])
    assert done.returncode == 1 and done.stderr.count("Traceback") == 1, done.stderr
    assert "ValueError: mine" in done.stderr and f"{script}:4, in <module>" in done.stderr


WRONG_MODULE = """
import torch
import hvdtrain as ht
net = torch.nn.Linear(1, 1)
ctx = ht.init("comm.engine=torchdist", "comm.reduce=ddp")
model, optimizer = ctx.prepare(net, torch.optim.SGD(net.parameters(), 0.1))
for batch in ctx.samples({"x": torch.ones(40, 1)}, batch=4):
    with torch.no_grad():
        model(batch["x"])
    ctx.backward(net(batch["x"]).sum())
    optimizer.step()
"""


@needs_mpirun
@pytest.mark.slow
def test_ddp_whose_module_is_not_called_is_an_error(tmp_path: Path) -> None:
    script = tmp_path / "wrong_module.py"
    script.write_text(WRONG_MODULE)
    done = mpirun(2, [str(script)])
    assert (
        done.returncode == 2
        and "called the module inside the prepared model, so its gradients are not reduced"
        in done.stderr
    ), done.stderr


ON_RANK_0_ALONE = """
import sys
import torch
import hvdtrain as ht
if sys.argv[1] == "key":
    ht.init("comm.engin=mpi")
net = torch.nn.Linear(1, 1)
ctx = ht.init("comm.engine=mpi", "run=" + sys.argv[2])
model, optimizer = ctx.prepare(net, torch.optim.SGD(net.parameters(), 0.1))
for batch in ctx.samples({"x": torch.ones(40, 1)}, batch=4):
    ctx.backward(model(batch["x"]).sum())
    optimizer.step()
    if ctx.rank == 0 and ctx.step == 3:
        ctx.checkpoint(model, optimizer, now=True)
"""


@needs_mpirun
@pytest.mark.slow
def test_a_call_on_one_rank_alone_and_a_wrong_key_are_told_with_the_line_of_the_script(
    tmp_path: Path,
) -> None:
    script = tmp_path / "script.py"
    script.write_text(ON_RANK_0_ALONE)
    done = mpirun(2, [str(script), "checkpoint", str(tmp_path / "run")])
    assert done.returncode == 2 and "hvdtrain: ranks made different calls" in done.stderr, (
        done.stderr
    )
    assert f"where: {script}:" in done.stderr and "Traceback" not in done.stderr
    done = python([str(script), "key", ""])
    assert (
        done.returncode == 2
        and "there is no key comm.engin\n  where: comm.engin, hvdtrain.init()" in done.stderr
    ), done.stderr
    assert f"{script}:6, in <module>" in done.stderr and "Traceback" not in done.stderr


@needs_mpirun
@needs_extra("launch")
@pytest.mark.slow
def test_elastic_follows_the_loop_in_its_run_folder(
    tmp_path: Path, straight: dict[str, Any]
) -> None:
    """A rank is killed at the first start; the second one resumes from the checkpoint."""
    out = tmp_path / "out.json"
    run = tmp_path / "run"
    words = [
        "launch",
        "--elastic",
        "--max",
        "2",
        "--",
        SCRIPT,
        str(out),
        "--kill",
        "27",
        "1",
        f"run={run}",
        "comm.engine=mpi",
    ]
    done = python(["-m", "hvdtrain", *words])
    assert done.returncode == 0, done.stderr
    assert "start 2: 2 ranks" in done.stderr and "at step 25" in done.stderr
    assert_equal(json.loads(out.read_text()), straight)
    assert "trains" in (run / "launch.jsonl").read_text()


def in_ways(folder: Path, size: int, *ways: str) -> list[dict[str, Any]]:
    """What own_ways_on_ranks.py gave in each way, one after the other in one start."""
    out = folder / f"of-{size}.json"
    words = alone("own_ways_on_ranks:main", str(out), *[f"{way} comm.engine=mpi" for way in ways])
    done = mpirun(size, words) if size > 1 else python(words)
    assert done.returncode == 0, done.stdout + done.stderr
    found: list[dict[str, Any]] = json.loads(out.read_text())
    return found


def assert_near(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Weights, losses and an evaluation; after a resume the losses behind it."""
    for name, weights in expected["weights"].items():
        np.testing.assert_allclose(
            found["weights"][name], weights, rtol=0, atol=1e-12, err_msg=f"{found['says']}: {name}"
        )
    np.testing.assert_allclose(
        found["losses"],
        expected["losses"][-len(found["losses"]) :],
        rtol=0,
        atol=1e-12,
        err_msg=found["says"],
    )
    assert found["evaluated"] == pytest.approx(expected["evaluated"], abs=1e-11), found["says"]


@needs_mpirun
def test_ranks_that_have_the_model_together(tmp_path: Path) -> None:
    """In parts of layers, in stages, with a dense part; clipped; of tokens; with means over counted
    targets, which some ranks lack; and a run that is resumed in another way than it began."""
    clip = "optim.clip_norm=0.1"
    whole, clipped, tokens, counted = in_ways(tmp_path, 1, "seed=0", clip, "gpt", "counted")
    run = f"run={tmp_path / 'run'}"
    guards = "guard.equal_steps=4 guard.nonfinite=skip"
    ways = [
        f"parallel.tensor=2 {guards}",
        f"parallel.pipeline=2 {guards}",
        f"parallel.dense=c {guards}",
        "parallel.tensor=2 shard.stage=1",
        "parallel.pipeline=2 parallel.schedule=zero_bubble parallel.balance=[1,3]",
    ]
    of_clipped = [
        f"parallel.tensor=2 {clip}",
        f"parallel.pipeline=2 {clip}",
        f"parallel.dense=a {clip}",
    ]
    resumed = [
        f"until=4 {run} parallel.tensor=2",
        f"until=8 {run} parallel.pipeline=2",
        f"{run} parallel.dense=a",
    ]
    of_tokens = of_this_copy(
        f"gpt parallel.tensor=2 parallel.sequence=true {words}"
        for words in rows_of_today(("", "shard.stage=3"))
    )
    layouts = (
        "",
        "shard.stage=2",
        "shard.stage=3",
        "parallel.tensor=2",
        "parallel.pipeline=2",
        "parallel.dense=c",
    )
    of_counted = rows_of_today(of_this_copy(f"counted {words}" for words in layouts))
    ways = rows_of_today(of_this_copy(ways))
    of_clipped = rows_of_today(of_this_copy(of_clipped))
    resumed = of_this_copy(resumed) or [run]
    resumed[-1] = re.sub(r"until=\d+ ", "", resumed[-1])
    ends = [int(end[1]) if (end := re.match(r"until=(\d+)", words)) else 12 for words in resumed]
    found = in_ways(tmp_path, 2, *of_counted, *ways, *of_clipped, *of_tokens, *resumed)
    for name, weights in plain_counted().items():
        np.testing.assert_allclose(counted["weights"][f"p.{name}"], weights, rtol=0, atol=1e-12)
    for result in found[: len(of_counted)]:
        assert_near(result, counted)
    found = found[len(of_counted) :]
    for result in found[: len(ways)]:
        assert_near(result, whole)
    for result in found[len(ways) : len(ways) + len(of_clipped)]:
        assert_near(result, clipped)
    for result in found[-len(of_tokens) - len(resumed) : -len(resumed)]:
        assert_near(result, tokens)
        assert "with parts of the positions" in result["says"]
    lengths = [end - begin for begin, end in itertools.pairwise([0, *ends])]
    assert [len(result["losses"]) for result in found[-len(resumed) :]] == lengths
    assert_near(found[-1], whole)
    starts = [
        json.loads(line)
        for line in (tmp_path / "run/events.jsonl").read_text().splitlines()
        if '"start"' in line
    ]
    for axis in ("tensor", "pipeline"):
        assert [start["mesh"][axis] for start in starts] == [
            2 if f"parallel.{axis}=2" in words else 1 for words in resumed
        ]
    assert ["mesh    1 data x 2 tensor" in start["lines"] for start in starts] == [
        "parallel.tensor=2" in words for words in resumed
    ], "the header is the trainer's"
    assert max(abs(a - b) for a, b in zip(whole["losses"], clipped["losses"], strict=True)) > 1e-3


@needs_mpirun
@pytest.mark.slow
@pytest.mark.ranks4
def test_pairs_of_ranks_that_have_the_model_together(tmp_path: Path) -> None:
    whole, tokens = in_ways(tmp_path, 1, "seed=0", "gpt")
    of_tokens = of_this_copy(
        f"gpt parallel.tensor=2 {words}"
        for words in ("", "parallel.sequence=true parallel.pipeline=2")
    )
    for result in in_ways(tmp_path, 4, *of_tokens):
        assert_near(result, tokens)
    ways = [
        "parallel.tensor=2",
        "parallel.pipeline=2",
        "parallel.tensor=2 parallel.pipeline=2",
        "parallel.tensor=2 shard.stage=2",
    ]
    for result in in_ways(tmp_path, 4, *of_this_copy(ways)):
        assert_near(result, whole)


@needs_mpirun
def test_local_steps_are_averaged_as_by_hand(tmp_path: Path) -> None:
    """Two ranks, 2 steps of SGD with momentum each by itself, then the mean of weights and
    momentum."""
    done = mpirun(2, alone("own_ways_on_ranks:local_steps", str(tmp_path / "out")))
    assert done.returncode == 0 and "as by hand" in done.stdout, done.stdout + done.stderr
