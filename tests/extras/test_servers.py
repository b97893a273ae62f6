"""Parameter servers: synchronous ones are one process, asynchronous ones keep their bound, end at
the same bits again, and go on."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from pool import on_ranks
from ranks import FULL, mpirun, needs_mpirun, python
from same_curve import check_same
from servers_on_ranks import BOUNDS, FEW, JOBS

from hvdtrain.comm.communicator import Communicator, Interruptible, SingleProcessCommunicator
from hvdtrain.comm.threads import ThreadCommunicator, ThreadRanks, run_threads
from hvdtrain.core.folder import Folder
from hvdtrain.core.progress import GoOn, Outstanding, WorkerUpdate
from hvdtrain.errors import DIVERGED, UserError
from hvdtrain.extras.servers.losses import (
    LostMeanwhile,
    RankSyncPoint,
    ServerAgreement,
    SurvivorReport,
    go_on_from,
)
from hvdtrain.extras.servers.turns import TicketWindow, UpdateOrder
from hvdtrain.extras.servers.update_log import (
    NAME,
    Header,
    StalenessGauge,
    UpdateLog,
    open_update_log,
    read_updates,
)

slow = pytest.mark.slow


class Simulation:
    """The first server, rank 0, with workers of which the last one is slow; some arrive at any
    time."""

    def __init__(self, workers: int, bound: int | None, seed: int, tickets: int = 60) -> None:
        self.draw = random.Random(seed)
        self.bound = bound
        self.order = UpdateOrder(bound)
        self.workers = list(range(1, 1 + workers))
        self.computing: set[int] = set()
        self.whole: dict[int, int] = {}  # worker -> the ticket of the gradient that it has
        self.behind = 100 + tickets
        self.order.begin(TicketWindow(100, self.behind, [], {}))
        for worker in self.workers:
            self.order.grant(worker)

    def run(self, losses: int = 0) -> list[WorkerUpdate]:
        while self.order.version < self.behind:
            self.computing |= set(self.order.readers())
            while self.order.next_update() is None:
                assert self.computing, "every worker waits for another one"
                self.arrive(
                    self.draw.choice(sorted(self.computing))
                    if self.draw.random() < 0.5
                    else min(self.computing)
                )
            if losses and self.draw.random() < 0.1:
                losses -= 1
                self.lose(self.draw.choice(self.workers), undone=self.draw.choice([0, 1]))
        return self.order.read_updates()

    def arrive(self, worker: int) -> None:
        self.computing.remove(worker)
        self.whole[worker] = self.order.window(self.order.version).reads[worker].ticket
        self.order.arrive(worker)
        self.order.grant(worker)

    def lose(self, lost: int, undone: int) -> None:
        """undone: updates that were chosen, and that not all servers could make."""
        window = self.order.window(self.order.version - undone)
        left = [worker for worker in self.workers if worker != lost]
        servers = SurvivorReport(0, window.first + len(window.updates), outstanding=window.reads)
        how = go_on_from(
            [servers, *(SurvivorReport(worker, held=self.whole.get(worker)) for worker in left)],
            servers=1,
        )
        assert how is not None and len(how.sent_again) + len(how.given_again) == len(window.reads)
        self.workers = [how.ranks[worker] for worker in left]
        self.computing = set()
        self.whole = {
            how.ranks[worker]: ticket for worker, ticket in self.whole.items() if worker != lost
        }
        self.order = UpdateOrder(self.bound)
        self.order.begin(window._replace(reads=how.sent_again))
        for worker in self.workers:
            if worker in how.sent_again:
                self.order.arrive(worker)
            self.order.grant(worker)


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
@pytest.mark.parametrize("bound", [1, 2, 4, 8, None])
def test_no_gradient_is_older_than_the_bound_and_no_worker_waits_for_ever(
    workers: int, bound: int | None
) -> None:
    oldest = 0
    for seed in range(20):
        updates = Simulation(workers, bound, seed).run()
        assert sorted(update.ticket for update in updates) == list(range(100, 160)), (
            "each step once"
        )
        oldest = max(oldest, *(update.staleness for update in updates))
        last_read = dict.fromkeys(range(1, 1 + workers), 100)
        for version, update in enumerate(updates, start=100):
            assert update.staleness <= version - last_read[update.worker]
            last_read[update.worker] = version + 1
    if workers == 1:
        assert oldest == 0
    elif bound is None:
        assert oldest > 8
    else:
        assert oldest == bound


@pytest.mark.parametrize("bound", [1, 2, 4, None])
def test_a_lost_worker_loses_no_update(bound: int | None) -> None:
    for seed in range(40):
        updates = Simulation(5, bound, seed).run(losses=4)
        assert sorted(update.ticket for update in updates) == list(range(100, 160)), (
            "each step once"
        )
        assert bound is None or max(update.staleness for update in updates) <= bound


def test_what_the_others_go_on_from() -> None:
    reads = {2: Outstanding(14, 10), 3: Outstanding(12, 11), 4: Outstanding(15, 11)}
    first = SurvivorReport(0, 13, outstanding=reads)
    second = SurvivorReport(1, 13, outstanding={})
    # 3 is lost; 4 computes the next gradient, 11 is one that an update was made from
    workers = [
        SurvivorReport(2, held=14),
        SurvivorReport(4, held=11),
    ]
    ranks = {0: 0, 1: 1, 2: 2, 4: 3}
    assert go_on_from([first, second, *workers], 2) == GoOn(
        13, ranks, {2: Outstanding(14, 10)}, [12, 15], source="servers"
    )
    assert go_on_from([first, *workers], 2) is None, "a server is lost"
    assert go_on_from([first, second], 2) is None, "no worker is left"
    assert go_on_from([first, second, *workers, None], 2) is None, "a rank is at another sync point"
    with pytest.raises(AssertionError, match="different updates"):
        go_on_from([first, second._replace(version=12), *workers], 2)
    points = RankSyncPoint()
    points.begin(10)
    assert points.is_begun(10) and not points.is_behind(10)
    points.synced()
    assert points.is_behind(10), "its sums and weights are of more steps than the others kept"
    assert not points.is_begun(13) and not points.is_behind(13), (
        "13 steps are kept, and none behind them has begun"
    )


class Gone(Exception):
    """What a message of a lost rank raises."""


class LostRanks(SingleProcessCommunicator):
    """All ranks, of which some are lost; the servers' group is another communicator."""

    interruptions = 0

    def is_loss(self, error: BaseException) -> bool:
        return isinstance(error, Gone)

    def interrupt(self) -> None:
        self.interruptions += 1


def test_servers_make_an_update_all_or_none() -> None:
    group = ThreadRanks(3)
    worlds = [LostRanks() for _ in range(3)]
    made: list[list[str]] = [[], [], []]

    def serve(rank: int) -> str:
        agreement = ServerAgreement(
            cast(Interruptible, worlds[rank]), cast(Communicator, ThreadCommunicator(group, rank))
        )
        try:
            for update in ("first", "second"):
                with agreement.all_or_none():
                    if (rank, update) == (1, "second"):
                        raise Gone
                made[rank].append(update)
        except (Gone, LostMeanwhile) as error:
            return type(error).__name__
        return "none"

    ends = run_threads([group], [lambda rank=rank: serve(rank) for rank in range(3)])  # type: ignore[misc]
    assert ends == ["LostMeanwhile", "Gone", "LostMeanwhile"] and made == [["first"]] * 3
    assert [world.interruptions for world in worlds] == [1, 1, 1], (
        "nobody waits for messages any more"
    )


@pytest.fixture(scope="module")
def one_process() -> dict[str, dict]:
    return dict(on_ranks("single", 1, "servers_on_ranks:curves", 0, False, False)[0]["jobs"])


@slow
@needs_mpirun
@pytest.mark.parametrize(
    ("engine", "servers", "workers", "words"),
    [
        pytest.param("mpi", 1, 2, ["faulty", *["few"] * (not FULL)], id="mpi-1-2"),
        *[
            pytest.param("mpi", 2, 2, ["few"], marks=pytest.mark.ranks4, id="mpi-2-2"),
            pytest.param("mpi", 1, 3, ["few"], marks=pytest.mark.ranks4, id="mpi-1-3"),
            pytest.param("torchdist", 2, 2, ["few"], marks=pytest.mark.ranks4, id="torchdist-2-2"),
        ]
        * FULL,
    ],
)
def test_servers(
    one_process: dict, engine: str, servers: int, workers: int, words: list[str]
) -> None:
    found = on_ranks(
        engine,
        servers + workers,
        "servers_on_ranks:curves",
        servers,
        "few" in words,
        "faulty" in words,
    )[0]
    assert found["jobs"].keys() == set(FEW if "few" in words else JOBS)
    for name, job in found["jobs"].items():
        check_same(name, job, one_process[name])
    if "faulty" in words:
        difference = np.array(found["faulty"]["losses"]) - np.array(
            one_process["sgd, micro-batches"]["losses"][:4]
        )
        assert np.abs(difference).max() > 1e-3, "a gradient that is left out is noticed"
    assert found["one ticket"]["ages"] == {"0": 6} and found["one ticket"]["count"] == 6 * 16, (
        "workers without one meet the others"
    )
    for bound, job in found["stale"].items():
        ages = Counter({int(age): n for age, n in job["ages"].items()})
        made = job["workers"]
        assert ages.total() == job["steps"] == 80 and job["count"] == 80 * 16
        assert min(made.values()) >= 2 and made[str(servers)] > made[str(servers + workers - 1)], (
            bound,
            made,
        )
        most = workers * 80 if bound == "none" else int(bound)
        assert 1 <= max(ages) <= most and (bound not in "12" or max(ages) == most), (bound, ages)
    assert found["stale"].keys() == set(BOUNDS)


@slow
@needs_mpirun
@pytest.mark.parametrize(
    ("engine", "servers", "options"),
    [
        ("mpi", 1, "optim.name=lamb servers.correct=scale model.dropout=0.2"),
        *[
            pytest.param(
                "torchdist",
                2,
                "optim.name=novograd servers.correct=delay_compensation",
                marks=pytest.mark.ranks4,
            )
        ]
        * FULL,
    ],
)
def test_a_job_is_replayed_resumed_with_servers_and_without(
    tmp_path: Path, engine: str, servers: int, options: str
) -> None:
    run = tmp_path / "run"
    words = (
        f"-m hvdtrain run={run} comm.engine={engine} model.name=mlp model.widths=[24,7] "
        f"comm.bucket_mb=0.004 servers.count={servers} "
    )
    words += f"servers.bound=2 servers.log=true optim.clip_norm=1 {options}"
    for epochs in (1, 2):
        result = mpirun(servers + 2, [*words.split(), f"epochs={epochs}"])
        assert result.returncode == 0, result.stderr
        assert (
            "servers  staleness of an update" in result.stdout
            and f"worker {servers}: " in result.stdout
        )
        replayed = python(["-m", "hvdtrain", "replay", str(run)], env={"OMP_NUM_THREADS": "2"})
        assert replayed.returncode == 0 and "are the same, bit by bit" in replayed.stdout, (
            replayed.stdout,
            replayed.stderr,
        )
    header, updates = read_updates(run)
    assert (
        header == Header(servers, 2, 1, 0)
        and sorted(update.ticket for update in updates) == list(range(len(updates))) != []
    )
    other = [
        f"resume={run}",
        f"run={tmp_path / 'other'}",
        "servers.count=0",
        "servers.log=false",
        "servers.correct=none",
        "epochs=3",
    ]
    alone = python(["-m", "hvdtrain", *other])
    assert alone.returncode == 0 and "resume  from step 45" in alone.stdout, (
        alone.stdout,
        alone.stderr,
    )
    swapped = (
        updates[10]._replace(ticket=updates[11].ticket),
        updates[11]._replace(ticket=updates[10].ticket),
    )
    (run / NAME).unlink()
    UpdateLog(run, header).append([*updates[:10], *swapped, *updates[12:]])
    replayed = python(["-m", "hvdtrain", "replay", str(run)])
    assert replayed.returncode == DIVERGED and "arrays of step 45 differ, by" in replayed.stdout, (
        replayed.stdout,
        replayed.stderr,
    )


def test_a_log_goes_on_at_the_update_that_follows(tmp_path: Path) -> None:
    header = Header(2, 3, 1, 0)
    updates = [
        WorkerUpdate(ticket, n % 3, 2 + ticket % 2) for n, ticket in enumerate((1, 0, 2, 4, 3))
    ]
    log = UpdateLog(tmp_path, header)
    log.append(updates[:2])
    log.append(updates[2:])
    assert (tmp_path / NAME).stat().st_size == 32 + 8 * 5 and read_updates(tmp_path) == (
        header,
        updates,
    )
    again = UpdateLog(tmp_path, header._replace(first=3))  # from a checkpoint of step 3
    again.append([WorkerUpdate(3, 3, 2)])
    assert read_updates(tmp_path) == (header, [*updates[:3], WorkerUpdate(3, 3, 2)])
    with (tmp_path / NAME).open("ab") as file:
        file.write(b"\0\0\0")  # of a job that was killed
    assert len(read_updates(tmp_path)[1]) == 4
    with pytest.warns(
        UserWarning,
        match="updates end before step 70000; the former one is updates-before-70000.bin",
    ):
        # 4 ... 6 were made without a log
        UpdateLog(tmp_path, header._replace(first=70000)).append([WorkerUpdate(70000, 65535, 2)])
    assert read_updates(tmp_path) == (header._replace(first=70000), [WorkerUpdate(70000, 65535, 2)])
    with pytest.warns(UserWarning, match="there were 2 servers, not 1"):
        UpdateLog(tmp_path, Header(1, 3, 1, 70001))
    assert read_updates(tmp_path) == (Header(1, 3, 1, 70001), [])
    with pytest.warns(
        UserWarning, match="each rank had 1 threads, not 2: OMP_NUM_THREADS=1 would continue it"
    ):
        UpdateLog(tmp_path, Header(1, 3, 2, 70002))
    assert Folder.open(tmp_path).names() == [
        *(f"updates-before-{step}.bin" for step in (70000, 70001, 70002)),
        NAME,
    ]


def test_a_log_that_goes_back_to_a_sync_point(tmp_path: Path) -> None:
    updates = [WorkerUpdate(ticket, 0, 1 + ticket % 2) for ticket in range(6)]
    log = UpdateLog(tmp_path, Header(1, 2, 1, 0))
    log.append(updates)
    log.cut(4)
    log.append([WorkerUpdate(5, 0, 1), WorkerUpdate(4, 1, 1)])
    assert read_updates(tmp_path)[1] == [*updates[:4], WorkerUpdate(5, 0, 1), WorkerUpdate(4, 1, 1)]
    # the job goes on with another number of workers
    fewer = UpdateLog(tmp_path, Header(1, 1, 1, 6))
    fewer.append([WorkerUpdate(6, 0, 1)])
    assert read_updates(tmp_path)[0] == Header(1, 2, 1, 0) and len(read_updates(tmp_path)[1]) == 7


def test_what_is_no_log(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no log of updates"):
        read_updates(tmp_path)
    (tmp_path / NAME).write_bytes(b"hvdtrain\x02" + bytes(23))
    with pytest.raises(UserError, match=r"updates\.bin is not a log of version 1"):
        read_updates(tmp_path)
    for header, update, message in (
        (
            Header(1, 2, 0, 0),
            WorkerUpdate(0, 0, 1),
            "it begins with 1 servers, 2 workers, 0 threads",
        ),
        (Header(1, 2, 1, 0), WorkerUpdate(0, 1, 1), "update 0 has ticket 0 and staleness 1"),
        (Header(1, 2, 1, 0), WorkerUpdate(-1, 0, 1), "update 0 has ticket -1 and staleness 0"),
    ):
        (tmp_path / NAME).unlink()
        UpdateLog(tmp_path, header).append([update])
        with pytest.raises(UserError, match=f"updates.bin is damaged: {message}"):
            read_updates(tmp_path)
    with pytest.raises(UserError, match=r"cannot read updates\.bin: Not a directory"):
        read_updates(tmp_path / NAME)
    (tmp_path / NAME).unlink()
    (tmp_path / NAME).symlink_to(tmp_path / "elsewhere")
    for use in (read_updates, lambda run: open_update_log(run, Header(1, 1, 1, 0))):
        with pytest.raises(UserError, match=r"updates\.bin is a link"):
            use(tmp_path)
    assert not (tmp_path / "elsewhere").exists() and Folder.open(tmp_path).names() == [NAME]


def test_staleness_is_counted_for_each_worker() -> None:
    read = [
        [WorkerUpdate(3, 1, 1)],
        [WorkerUpdate(0, 0, 1), WorkerUpdate(2, 1, 1), WorkerUpdate(1, 2, 2)],
        [],
    ]
    meter = StalenessGauge(read.pop)
    assert meter.fields({}, 1) == {} and meter.lines() == []
    assert meter.fields({}, 1) == {"staleness": {"1": {"0": 1, "1": 1}, "2": {"2": 1}}}
    assert meter.fields({}, 1) == {"staleness": {"1": {"1": 1}}}
    assert meter.lines() == [
        "servers  staleness of an update 1.00, at most 2: 0 in 25%, 1 in 50%, 2 in 25%",
        "         worker 1: 3 updates, staleness 0.67, at most 1",
        "         worker 2: 1 updates, staleness 2.00, at most 2",
    ]
