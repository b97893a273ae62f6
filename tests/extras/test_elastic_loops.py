"""hvdtrain.run() with guard.lost=shrink: ranks are killed, the others call the loop again, and the
end is that of one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from faults import events
from lost_ranks import finish
from own_loop import SCRIPT, STEPS, assert_equal
from ranks import FULL, needs_mpirun, python

import hvdtrain as ht
from hvdtrain.errors import DONE, UserError

IN_A_STEP_WHILE_OTHERS_BEGIN_AGAIN_AND_RANK_0 = (
    "2 context.py:backward 18, 1 context.py:prepare 2, 0 context.py:backward 28"
)
AT_THE_END = "0 context.py:close 1"
CASES = [
    ("mpi", 4, IN_A_STEP_WHILE_OTHERS_BEGIN_AGAIN_AND_RANK_0, {0, 1, 2}, "shard.stage=1"),
    ("torchdist", 3, "0 context.py:backward 9, 2 saver.py:_write 1", {0}, ""),
    *[
        ("mpi", 2, AT_THE_END, {0}, ""),
        ("torchdist", 4, IN_A_STEP_WHILE_OTHERS_BEGIN_AGAIN_AND_RANK_0, {0, 1, 2}, "shard.stage=2"),
        ("mpi", 3, "0 context.py:checkpoint 14, 1 context.py:checkpoint 25", {0, 1}, ""),
    ]
    * FULL,
]


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of one process without faults, by hvdtrain.init()."""
    folder = tmp_path_factory.mktemp("straight")
    done = python([SCRIPT, str(folder / "out.json"), f"run={folder / 'run'}"])
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads((folder / "out.json").read_text())
    return found


@needs_mpirun
@pytest.mark.faults
@pytest.mark.ranks4
@pytest.mark.parametrize(("engine", "size", "plan", "lost", "words"), CASES)
def test_the_end_is_that_of_one_process(
    engine: str,
    size: int,
    plan: str,
    lost: set[int],
    words: str,
    tmp_path: Path,
    straight: dict[str, Any],
) -> None:
    out = tmp_path / "out.json"
    run = tmp_path / "run"
    argv = [
        SCRIPT,
        str(out),
        "--run",
        plan,
        f"run={run}",
        "guard.lost=shrink",
        "log.every_s=0",
        *words.split(),
    ]
    results = finish(engine, size, argv)
    codes = [result.returncode for result in results]
    assert codes == (
        [DONE] if engine == "mpi" else [-9 if rank in lost else DONE for rank in range(size)]
    ), results
    assert_equal(json.loads(out.read_text()), straight)
    found = [event for event in events(run) if event["kind"] == "lost"]
    assert {rank for event in found for rank in event["ranks"]} == lost and found[-1][
        "left"
    ] == size - len(lost)
    assert all(event["step"] % 10 == 0 or event["step"] == STEPS for event in found), (
        "where a checkpoint is"
    )
    assert not list(run.glob("*lock*"))


def test_one_process(tmp_path: Path) -> None:
    """It cannot lose a rank."""
    sizes = []
    words = {"run": str(tmp_path / "run"), "guard.lost": "shrink"}
    assert ht.run(lambda ctx: sizes.append(ctx.size), words) == 0
    assert sizes == [1]


@pytest.mark.parametrize(
    ("words", "what", "fix"),
    [
        ([], "without run= there are none", "run=DIR"),
        (
            ["shard.stage=3", "run=somewhere"],
            "cannot continue on fewer ranks with shard.stage=3",
            "shard.stage=2",
        ),
    ],
)
def test_what_cannot_be(
    words: list[str], what: str, fix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as caught:
        ht.run(print, "guard.lost=shrink", *words)
    assert what in caught.value.what and fix in caught.value.fix, str(caught.value)
    ht.init().close()


WRONG = """
import os, signal, sys
import torch
import hvdtrain as ht

outside = torch.nn.Linear(1, 1)

def train(ctx):
    net = outside if sys.argv[1] == "outside" else torch.nn.Linear(1, 1)
    model, optimizer = ctx.prepare(net, torch.optim.SGD(net.parameters(), 0.1))
    if sys.argv[1] == "outside":
        ctx.resume()
    for batch in ctx.samples({"x": torch.ones(40, 1)}, batch=4):
        ctx.backward(model(batch["x"]).sum())
        if ctx.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()

sys.exit(ht.run(train, "guard.lost=shrink", *sys.argv[2:]))
"""


@needs_mpirun
@pytest.mark.faults
@pytest.mark.parametrize(
    ("mistake", "text"),
    [
        (
            "resume",
            "guard.lost=shrink resumes from the newest checkpoint, but the loop would start "
            "from the beginning\n  where: ctx.samples()",
        ),
        ("outside", "the model was prepared before a rank was lost\n  where: ctx.prepare()"),
    ],
)
def test_a_function_that_cannot_be_called_again(mistake: str, text: str, tmp_path: Path) -> None:
    script = tmp_path / "wrong.py"
    script.write_text(WRONG)
    result, _ = finish("torchdist", 2, [str(script), mistake, f"run={tmp_path / 'run'}"])
    assert result.returncode == 2 and text in result.stderr, result
