"""servers.*: what excludes them, what follows from them before a job begins, the table of their
report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from invariance import SGD
from pool import on_ranks
from ranks import needs_extra, needs_mpirun
from refusals import refusal_of_job

from hvdtrain.__main__ import main
from hvdtrain.comm.engines import needed_features
from hvdtrain.config.read import configure
from hvdtrain.errors import UserError
from hvdtrain.extras.servers.tables import staleness
from hvdtrain.records.run import RunRecord

# (the configuration, the engine, ranks, what the message says, the key that it names, how to fix
# it)
REFUSED = [
    ("optim.name=muon "
     "servers.count=1", "mpi", 2, "optim.name=muon does not support "
                                  "servers.count=1", "servers.count",
     "leave servers.count out, or optim.name=adamw"),
    ("servers.count=1", "horovod", 2, "servers.count=1 needs sends between ranks, which the "
    "horovod engine does not support", "comm.engine",
     "comm.engine=mpi with the same mpirun, or comm.engine=torchdist"),
    ("servers.count=3", "mpi", 3, "servers.count=3 leaves no worker: the job has 3 "
                                  "ranks", "servers.count",
     "4 ranks or more, or fewer servers"),
    ("servers.count=1 "
     "comm.local_steps=2", "mpi", 2, "servers.count=1 does not support "
                                     "comm.local_steps=2", "comm.local_steps",
     "leave comm.local_steps out, or servers.count=0"),
    ("guard.lost=shrink "
     "servers.count=1", "torchdist", 2, "guard.lost=shrink is not supported with "
                                        "servers.count=1 on the torchdist engine",
     "guard.lost", "comm.engine=mpi (mpirun --with-ft ulfm), or guard.lost=stop"),
    ("guard.lost=restart servers.count=1", "torchdist", 2,
     "guard.lost=restart is not supported with servers.count=1 on the torchdist engine",
     "guard.lost",
     "comm.engine=mpi (mpirun --with-ft ulfm), or guard.lost=stop"),
    ("servers.count=1 servers.bound=4 servers.log=true log.every_steps=70000", "mpi", 2,
     "servers.log needs a sync point every 65535 steps or less, but this is "
     "log.every_steps=70000", "log.every_steps",
     "log.every_steps=65535"),
    ("recipe.schedule=plateau servers.count=1 servers.bound=2 servers.log=true", "mpi", 2,
     "servers.log replays steps from their positions in the job, but with "
     "recipe.schedule=plateau evaluations change the rate", "servers.log",
     "servers.log=false, or another recipe.schedule"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "engine", "ranks", "what", "key", "fix"), REFUSED)
def test_what_is_refused(
    words: str, engine: str, ranks: int, what: str, key: str, fix: str
) -> None:
    found, where, how = refusal_of_job(words, engine, ranks)
    assert (found, where.partition(",")[0], how) == (what, key, fix)


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        pytest.param(
            ["lr-find", "servers.count=1"],
            "which servers.count=1 does not",
            marks=needs_extra("bench"),
        ),
        (
            [
                "plan",
                "data.name=digits",
                "servers.count=1",
                "comm.engine=mpi",
                "--memory",
                "--ranks",
                "3",
            ],
            "the memory of parameter servers and their workers is not predicted",
        ),
    ],
)
def test_what_commands_refuse(arguments: list[str], what: str, capsys: Any) -> None:
    assert main(arguments) == 2
    assert what in capsys.readouterr().err


def test_a_loop_of_a_script_has_no_servers() -> None:
    from hvdtrain import init

    with pytest.raises(
        UserError, match="servers.count is not supported in a custom loop"
    ) as caught:
        init("servers.count=1")
    assert "a worker makes no step" in caught.value.fix


def test_they_need_messages_between_two_ranks() -> None:
    assert needed_features(configure(None, ["servers.count=1"])) == {"p2p"}
    assert needed_features(configure(None, [])) == set()


def test_readers_are_workers() -> None:
    for words, ranks in (("servers.bound=0", 3), ("servers.bound=2", 1), ("servers.bound=none", 1)):
        config = configure(None, ["servers.count=2", *words.split()])
        assert (config.readers(5), config.first_reader(5), config.first_reader(1)) == (ranks, 2, 1)


@needs_mpirun
def test_synchronous_servers_have_the_curve_of_one_process() -> None:
    """By SGD without clipping, which hides no gradient of another scale."""
    one = on_ranks("single", 1, "invariance:curve", SGD)[0]
    many = on_ranks("mpi", 3, "invariance:curve", f"{SGD} servers.count=1")[0]
    assert len(one["losses"]) == len(many["losses"]) == 4
    assert many["losses"] == pytest.approx(one["losses"], rel=1e-12)
    assert many["val"] == pytest.approx(one["val"], rel=1e-12)


def test_staleness_is_a_table_of_workers() -> None:
    ages = [{"2": {"0": 1, "3": 2}, "10": {"1": 4}}, {"2": {"0": 1}, "3": "?"}]
    events: list[dict[str, Any]] = [
        {"kind": "step", "step": 5 * number, "staleness": of_workers}
        for number, of_workers in enumerate(ages, 1)
    ]
    assert staleness(RunRecord(Path("run"), {}, events)).rows == [
        ["2", "4", "1.5", "3", "0: 50.00%, 3: 50.00%"],
        ["10", "4", "1", "1", "1: 100.00%"],
    ]
    assert staleness(RunRecord(Path("run"), {}, [])).rows == []
