"""The torchdist engine without MPI: the rendezvous, ranks started by --num-nodes and by torchrun,
and how they end together."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from pool import on_ranks
from ports import free_port
from rank_threads import ThreadRank, in_threads
from ranks import (
    FULL,
    HANG_S,
    Job,
    environment,
    mpirun,
    needs_extra,
    needs_mpirun,
    of_this_copy,
    python,
)
from waiting import wait_until

from hvdtrain import errors
from hvdtrain.comm import torchdist
from hvdtrain.comm.communicator import SingleProcessCommunicator
from hvdtrain.comm.engines import Feature, Installed, needed_features, select_engine
from hvdtrain.comm.launcher_variables import NO_LAUNCHER, SUBMITIT, Placement
from hvdtrain.comm.meeting import ALL, wait_for_all_ranks
from hvdtrain.comm.mesh import one_group
from hvdtrain.comm.rendezvous import (
    LOOPBACK,
    PORTS,
    Rendezvous,
    address_towards,
    expand_nodes,
    find_rendezvous,
    host_to_connect,
    interface_of,
    listen,
    listening_address,
    local_address,
    parse_address,
)
from hvdtrain.comm.signed import SignedStore, unpack
from hvdtrain.comm.torch_groups import _connected, connect_gloo_lazily, extremes
from hvdtrain.config.read import configure
from hvdtrain.config.sections.comm import CommConfig
from hvdtrain.errors import UserError
from hvdtrain.frameworks.stopwatch import HostStopwatch
from hvdtrain.frameworks.torch.device import check_shared, shared_gpu
from hvdtrain.frameworks.torch.parallel.whole_model import select_strategy

DATA = ["data.name=synthetic", "data.shape=[8,8,3]", "data.samples=96", "data.val_samples=30"]
DATA += ["model.name=mlp", "batch.size=16", "speed.precision=fp64"]
TORCHRUN = Placement(1, 4, 1, 2, "torchrun")
SRUN = Placement(1, 4, 1, 2, "srun")


@pytest.mark.parametrize(
    ("nodes", "hosts"),
    [
        ("n1", ["n1"]),
        ("n1,n2", ["n1", "n2"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[08-10,12],gpu3", ["n08", "n09", "n10", "n12", "gpu3"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
        ("a[1-2]-ib,b", ["a1-ib", "a2-ib", "b"]),
        ("", []),
    ],
)
def test_lists_of_nodes(nodes: str, hosts: list[str]) -> None:
    assert expand_nodes(nodes) == hosts


def test_rendezvous_of_torchrun_srun_and_the_user() -> None:
    environ = {
        "MASTER_ADDR": "n1",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": "7",
    }
    assert find_rendezvous(TORCHRUN, environ, None) == Rendezvous(
        "n1", 29500, hosted=True, job="hvdtrain/7/0"
    )
    for restarts in ("0", "1"):  # a node that comes back counts from 0
        own = environ | {
            "TORCHELASTIC_USE_AGENT_STORE": "False",
            "TORCHELASTIC_RESTART_COUNT": restarts,
        }
        assert find_rendezvous(TORCHRUN, own, None) == Rendezvous("n1", 29500, job="hvdtrain/7/")
    slurm = {"SLURM_STEP_NODELIST": "n[1-2]", "SLURM_JOB_ID": "12", "SLURM_STEP_ID": "0"}
    rendezvous = find_rendezvous(SRUN, slurm, None)
    assert (
        rendezvous is not None
        and (rendezvous.host, rendezvous.peer, rendezvous.job) == ("n1", "n2", "hvdtrain/12/0/0")
        and rendezvous.port in PORTS
    )
    ports = {
        m.port
        for step in range(20)
        if (m := find_rendezvous(SRUN, slurm | {"SLURM_STEP_ID": str(step)}, None))
    }
    assert len(ports) > 17, "steps of one job have different ports"
    assert find_rendezvous(SRUN, slurm, "n1:4000") == Rendezvous("n1", 4000, "n2")
    assert find_rendezvous(Placement(0, 2, 0, 2, "Open MPI's mpirun"), {}, None) is None
    local = find_rendezvous(
        Placement(1, 2, 1, 2, SUBMITIT.name), {"SUBMITIT_LOCAL_JOB_ID": "5236"}, None
    )
    assert local == find_rendezvous(
        Placement(0, 2, 0, 2, SUBMITIT.name), {"SUBMITIT_LOCAL_JOB_ID": "5236"}, None
    )
    assert local is not None and local.host == LOOPBACK and local.port in PORTS


@pytest.mark.parametrize(
    ("place", "environ", "address", "words"),
    [
        (
            TORCHRUN,
            {"MASTER_ADDR": "n1"},
            None,
            ["torchrun did not set MASTER_PORT", "comm.address=HOST:PORT"],
        ),
        (SRUN, {}, None, ["srun did not set SLURM_STEP_NODELIST"]),
        (
            Placement(0, 2, 0, 2, "horovodrun"),
            {},
            None,
            ["horovodrun gives its processes no address", "comm.engine=horovod"],
        ),
        (TORCHRUN, {}, "n1", ["'n1' is not HOST:PORT", "comm.address=n1:29500"]),
        (TORCHRUN, {}, "n1:70000", ["'n1:70000' is not HOST:PORT"]),
        (
            TORCHRUN,
            {},
            "127.0.0.1:29500",
            [
                "127.0.0.1 means a different machine on each host, but only 2 of 4 ranks",
                "comm.address, rank 1 on ",
            ],
        ),
        (
            TORCHRUN,
            {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"},
            None,
            ["localhost means a different machine on each host", "MASTER_ADDR, rank"],
        ),
    ],
)
def test_no_rendezvous(
    place: Placement, environ: dict[str, str], address: str | None, words: list[str]
) -> None:
    with pytest.raises(UserError) as caught:
        find_rendezvous(place, environ, address)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_addresses() -> None:
    assert parse_address("[fe80::1]:29500") == ("fe80::1", 29500)
    assert address_towards(LOOPBACK) == LOOPBACK and address_towards("no-such-host.invalid") is None
    assert interface_of(LOOPBACK) == "lo" and interface_of("203.0.113.9") is None
    assert listening_address(["a", "a"], "a") == LOOPBACK
    with pytest.raises(
        UserError,
        match=r"a does not find the network to no-such-host.invalid: its name has no address",
    ):
        listening_address(["a", "no-such-host.invalid"], "a")


def test_rank_0_listens_on_one_address_only() -> None:
    with listen(Rendezvous(LOOPBACK, 0), one_host=True) as listener:
        host, port = listener.getsockname()
        assert host == LOOPBACK
        with pytest.raises(
            UserError, match="rank 0 cannot listen for the other ranks: Address already in use"
        ):
            listen(Rendezvous(LOOPBACK, port), one_host=True)
    with pytest.raises(
        UserError,
        match=r"127\.0\.0\.1 is 127\.0\.0\.1 on its own host, which other hosts cannot reach",
    ):
        listen(Rendezvous(LOOPBACK, 0), one_host=False)


def test_a_name_that_is_a_loopback_one_at_home() -> None:
    """As Debian writes /etc/hosts: n1 is 127.0.1.1 on n1, and 10.0.0.1 to all others."""
    route = {
        "10.0.0.1": "10.0.0.1",
        "n1": LOOPBACK,
        "n2": "10.0.0.1",
    }.get  # host -> n1's own address on the network to it
    by_name = Rendezvous("n1", 4000, "n2")
    alone = Rendezvous("n1", 4000)
    assert (
        local_address(by_name, False, route) == "10.0.0.1"
        and host_to_connect(by_name, False, route) == "10.0.0.1"
    )
    assert (
        local_address(by_name, True, route) == LOOPBACK
        and host_to_connect(by_name, True, route) == "n1"
    )
    by_address = Rendezvous("10.0.0.1", 4000, "n1")
    assert local_address(by_address, False, route) == "10.0.0.1", (
        "then SLURM's name of this host does not matter"
    )
    assert (
        local_address(alone, False, route) is None and host_to_connect(alone, False, route) == "n1"
    )
    assert host_to_connect(alone._replace(hosted=True), False, route) == "n1"
    with pytest.raises(UserError, match=r"n1 is 127\.0\.0\.1 on its own host"):
        listen(alone, one_host=False, route=route)


LIMIT = timedelta(seconds=600)  # of a rendezvous, which no test reaches
STORE = """
import sys, time
from datetime import timedelta
import torch.distributed as dist
from hvdtrain.comm.side_channel import StoreSideChannel
from hvdtrain.comm.signed import SignedStore
rank, port, how = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
limit = timedelta(seconds=600)
store = dist.TCPStore("127.0.0.1", port, 2, is_master=not rank, timeout=limit, wait_for_workers=False)
if not rank:
    port = store.port
    print(port, flush=True)
def connect():
    return SignedStore(dist.TCPStore("127.0.0.1", port, None, is_master=False, timeout=limit, wait_for_workers=False), "of the job")
channel = StoreSideChannel(connect, rank, 2)
store.add("ready", 1)
while store.add("ready", 0) < 2:
    time.sleep(0.02)
if how == "stranger" or (rank and how == "late"):
    time.sleep(1e6)
channel.close(2.0 if how == "late" else 600.0)
"""  # noqa: E501


@contextlib.contextmanager
def ranks_with_a_store(how: str) -> Iterator[tuple[Job, Job, int]]:
    """Rank 0, which hosts the store, rank 1, and the port."""
    with Job(0, ["-c", STORE, "0", "0", how]) as host:
        wait_until(lambda: "\n" in host.output(), "rank 0 says its port")
        port = int(host.output())
        with Job(0, ["-c", STORE, "1", str(port), how]) as other:
            yield host, other, port


@pytest.mark.in_turn
@pytest.mark.parametrize(("how", "code"), [("both", 0), ("late", errors.LOST)])
def test_ranks_close_a_store_together(how: str, code: int) -> None:
    """Rank 0, which hosts the store, waits for a limited time; a rank that has not closed by then
    exits with an error."""
    with ranks_with_a_store(how) as (host, other, _):
        kept = host.wait()
        left = other.wait()
    assert left.returncode == code, left
    assert ("the connection to rank 0 broke" in left.stderr) == (how == "late"), left
    if how == "both":
        assert (kept.returncode, kept.stderr, left.stderr) == (0, "", ""), (kept, left)


@pytest.mark.in_turn
def test_a_stranger_does_not_end_a_job_with_success() -> None:
    """Who reaches the port can end a job, not make it look done."""
    with ranks_with_a_store("stranger") as (host, other, port):
        stranger = dist.TCPStore(
            LOOPBACK, port, None, is_master=False, timeout=LIMIT, wait_for_workers=False
        )
        wait_until(lambda: stranger.add("ready", 0) == 2, "both ranks are there")
        stranger.set("abort", "0")
        kept = host.wait()
        left = other.wait()
    assert (kept.returncode, left.returncode) == (errors.LOST, errors.LOST), (kept, left)
    assert "a process outside of the job wrote an end into the store" in left.stderr, left


@pytest.mark.parametrize("launched", [(2, 3), (3, 2)])
def test_ranks_started_for_different_numbers_of_ranks_say_so_when_they_meet(
    launched: tuple[int, int],
) -> None:
    """As where --num-gpus differs between hosts: not after comm.timeout_s, and on both."""
    began = time.monotonic()
    found = meet(
        Placement(0, launched[0], 0, 1, "torchrun"), Placement(1, launched[1], 0, 1, "torchrun")
    )
    assert time.monotonic() - began < LIMIT.total_seconds() / 2
    assert str(found[0]) == str(found[1])
    for rank, size in enumerate(launched):
        assert (
            f"rank {rank} on {socket.gethostname()} was started as one of {size} ranks, 1 on its "
            "host" in found[0].what
        )
    assert found[0].fix.startswith("start every host with the same --num-nodes and --num-gpus")


def test_ranks_with_different_secrets_do_not_meet() -> None:
    places = Placement(0, 2, 0, 1, "torchrun"), Placement(1, 2, 0, 1, "torchrun")
    assert meet(*places, secrets=("a", "a")) == [None, None]
    found = meet(*places, secrets=("a", "b"))
    assert [error.what for error in found] == [
        "the process at the job's address does not have the job's secret"
    ] * 2
    assert "HVDTRAIN_SECRET" in found[0].fix


class CountsKeys(SignedStore):
    """Counts the keys that all ranks name together."""

    named = itertools.count()

    def wait(self, keys: Sequence[str], timeout: timedelta) -> None:
        for _ in keys:
            next(self.named)
        super().wait(keys, timeout)

    def has(self, *keys: str) -> bool:
        next(self.named)
        return super().has(*keys)

    def get(self, key: str) -> Any:
        next(self.named)
        return super().get(key)


@pytest.mark.parametrize("ranks", [8, 32])
def test_the_keys_that_ranks_name_when_they_meet_grow_as_the_ranks(
    ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = dist.HashStore()
    monkeypatch.setattr(CountsKeys, "named", itertools.count())

    def arrive(rank: int) -> None:
        place = Placement(rank, ranks, 0, 1, "torchrun")
        wait_for_all_ranks(CountsKeys(store, "secret"), Rendezvous(LOOPBACK, 1), place, LIMIT)

    with ThreadPoolExecutor(ranks) as pool:
        list(pool.map(arrive, range(ranks)))
    assert next(CountsKeys.named) <= 6 * ranks


def test_a_stranger_does_not_say_that_all_ranks_are_there() -> None:
    store = dist.HashStore()
    store.set(ALL, "a word without the job's signature")
    with pytest.raises(
        UserError, match="the process at the job's address does not have the job's secret"
    ):
        wait_for_all_ranks(
            SignedStore(store, "secret"),
            Rendezvous(LOOPBACK, 1),
            Placement(1, 2, 0, 1, "torchrun"),
            LIMIT,
        )


def meet(*places: Placement, secrets: tuple[str, str] = ("", "")) -> list[Any]:
    """What wait_for_all_ranks() raises in each of two processes that meet at one store; None where
    it returns."""
    hosted = dist.TCPStore(LOOPBACK, 0, None, is_master=True, timeout=LIMIT, wait_for_workers=False)

    def arrive(rank: int) -> Exception | None:
        time.sleep(0.2 * rank)
        store = dist.TCPStore(
            LOOPBACK, hosted.port, None, is_master=False, timeout=LIMIT, wait_for_workers=False
        )
        try:
            wait_for_all_ranks(
                SignedStore(store, secrets[rank]),
                Rendezvous(LOOPBACK, hosted.port),
                places[rank],
                LIMIT,
            )
        except UserError as error:
            return error
        return None

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(arrive, range(2)))


class TwoRanks(SingleProcessCommunicator):
    """Rank 0 of two, whose GPUs have these identities."""

    size = 2

    def __init__(self, gpus: tuple[str, str], *, nccl: bool) -> None:
        self._gpus = gpus
        self.features = frozenset[Feature](("nccl",) if nccl else ())

    def allgather_object(self, thing: Any) -> list[Any]:
        return [thing._replace(gpu=gpu) for gpu in self._gpus]


def test_two_ranks_on_one_gpu_are_refused_where_nccl_reduces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # there is no GPU here
    monkeypatch.setattr(
        "torch.cuda.get_device_properties", lambda device: SimpleNamespace(uuid="a")
    )
    gpu = torch.device("cuda", 0)
    where = "speed.device, default"
    check_shared(gpu, TwoRanks(("a", "b"), nccl=True), where)
    check_shared(gpu, TwoRanks(("a", "a"), nccl=False), where)
    with pytest.raises(
        UserError, match=r"ranks 0, 1 on .* train on one GPU, which NCCL does not support"
    ):
        check_shared(gpu, TwoRanks(("a", "a"), nccl=True), where)


def test_two_ranks_on_one_gpu_are_named() -> None:
    assert shared_gpu([("n1", "a"), ("n1", "b"), ("n2", "a"), ("n2", None), ("n2", None)]) == ""
    assert (
        shared_gpu([("n1", "a"), ("n1", "b"), ("n1", "a")]) == "ranks 0, 2 on n1 train on one GPU"
    )


def test_what_auto_means() -> None:
    def chosen(
        launcher: str,
        *,
        horovod: bool,
        horovod_nccl: bool = False,
        nccl: bool = False,
        environ: tuple[str, ...] = (),
        words: str = "",
    ) -> tuple[str, str]:
        place = NO_LAUNCHER if launcher == "none" else Placement(0, 2, 0, 2, launcher)
        installed = Installed(lambda: horovod, lambda: horovod_nccl, lambda: nccl)
        return select_engine(
            place,
            dict.fromkeys(environ, "0"),
            installed,
            needed_features(configure(None, words.split())),
        )

    mpirun = "Open MPI's mpirun"
    assert chosen("none", horovod=True) == ("single", "no launcher")
    alone = ("single", "no launcher (SLURM_NTASKS=0: hvdtrain launch would start as many ranks)")
    assert chosen("none", horovod=True, environ=("SLURM_NTASKS",)) == alone
    assert chosen(mpirun, horovod=True) == ("horovod", f"started by {mpirun}, Horovod is installed")
    assert chosen(mpirun, horovod=True, horovod_nccl=True, nccl=True)[0] == "horovod"
    assert chosen(mpirun, horovod=True, nccl=True) == (
        "torchdist",
        f"started by {mpirun}, there are GPUs, and Horovod was built without NCCL (python -m "
        "hvdtrain.cli.horovod --nccl builds it)",
    )
    assert chosen(mpirun, horovod=False, nccl=True)[0] == "torchdist"
    assert chosen(mpirun, horovod=False)[0] == "mpi"
    assert chosen("torchrun", horovod=True)[0] == "torchdist"
    assert chosen("srun", horovod=True)[0] == "torchdist"
    assert chosen("srun", horovod=True, environ=("PMIX_RANK",))[0] == "horovod"
    assert chosen("horovodrun", horovod=True, nccl=True)[0] == "horovod"
    p2p = ("mpi", f"started by {mpirun}, the job needs p2p, which Horovod does not support")
    for words in of_this_copy(["parallel.pipeline=2"]):
        assert chosen(mpirun, horovod=True, words=words) == p2p
        assert chosen("horovodrun", horovod=True, words=words)[0] == "horovod"
    assert chosen(mpirun, horovod=True, words="guard.lost=shrink")[0] == "mpi"


@pytest.mark.slow
@needs_extra("launch")
def test_spawned_and_under_torchrun_ranks_train_what_one_process_does(tmp_path: Path) -> None:
    words = [*DATA, "epochs=2", "log.every_steps=2", "checkpoint.keep_last=1"]
    by_num_gpus = ["-m", "hvdtrain", "--num-gpus", "2", *words, f"run={tmp_path / 'num-gpus'}"]
    by_torchrun = [
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--master-addr",
        LOOPBACK,
        "--master-port",
        str(free_port()),
    ]
    by_torchrun += ["-m", "hvdtrain", *words, "comm.reduce=ddp", f"run={tmp_path / 'torchrun'}"]
    losses = {}
    for name, argv in {
        "one": ["-m", "hvdtrain", *words, f"run={tmp_path / 'one'}"],
        "num-gpus": by_num_gpus,
        "torchrun": by_torchrun,
    }.items():
        result = python(argv)
        assert result.returncode == errors.DONE, result.stderr
        events = [
            json.loads(line) for line in (tmp_path / name / "events.jsonl").read_text().splitlines()
        ]
        losses[name] = [event["loss"] for event in events if event["kind"] == "step"]
        ranks = next(event["ranks"] for event in events if event["kind"] == "start")
        assert ranks == (1 if name == "one" else 2)
    assert losses["one"] and losses["num-gpus"] == pytest.approx(losses["one"], rel=1e-12)
    assert losses["torchrun"] == pytest.approx(losses["one"], rel=1e-12)


LONG = ["-m", "hvdtrain", "--num-gpus", "2", *DATA, "epochs=100000", "log.every_steps=5"]


KILLED = (128 + signal.SIGKILL, errors.LOST)  # whichever of the two ranks ends first


@pytest.mark.faults
@needs_extra("launch")
@pytest.mark.parametrize(
    ("number", "target", "codes"),
    [
        (signal.SIGUSR2, "launcher", (errors.REQUEUE,)),
        (signal.SIGKILL, 1, KILLED),
        (signal.SIGKILL, "launcher", ()),
        *[(signal.SIGKILL, 0, KILLED), (signal.SIGSTOP, 1, (errors.STALLED,))] * FULL,
    ],
)
def test_spawned_ranks_end_together(
    tmp_path: Path, number: signal.Signals, target: int | str, codes: tuple[int, ...]
) -> None:
    stall_s = 3 if errors.STALLED in codes else 100
    with Job(0, [*LONG, f"guard.stall_s={stall_s}", f"run={tmp_path / 'run'}"]) as job:
        wait_until(
            lambda: (tmp_path / "run" / "checkpoints").exists() and len(job.pids()) == 2,
            "both ranks train",
        )
        pids = job.pids()
        parent = int(Path(f"/proc/{pids[0]}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(parent if target == "launcher" else pids[int(target)], number)
        result = job.wait()
        wait_until(
            lambda: not [pid for pid in pids.values() if Path(f"/proc/{pid}").exists()],
            "both ranks are gone",
        )
    assert not codes or result.returncode in codes, result
    if errors.STALLED in codes:
        assert (
            "no answer" in result.stderr and f"rank 1 on {socket.gethostname()}" in result.stderr
        ), result.stderr
    if (number, target) == (signal.SIGKILL, 1):
        assert "the connection to another rank broke" in result.stderr, result.stderr


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_named() -> None:
    environ = {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(free_port()),
    }
    result = python(["-m", "hvdtrain", *DATA, "comm.timeout_s=1"], env=environ)
    assert result.returncode == errors.USER
    assert "rank 1 did not arrive within 1 s" in result.stderr, result.stderr
    result = python(
        ["-m", "hvdtrain", *DATA, "comm.timeout_s=1"],
        env=environ | {"RANK": "1", "LOCAL_RANK": "1"},
    )
    assert result.returncode == errors.USER
    assert "the rendezvous does not answer within 1 s" in result.stderr, result.stderr


@pytest.mark.slow
@needs_extra("launch")
def test_a_loss_that_does_not_reach_a_parameter_is_refused_by_ddp() -> None:
    words = [*DATA, "model.name=faulty:Faulty", "comm.reduce=ddp", "epochs=1"]
    result = python(
        ["-m", "hvdtrain", "--num-gpus", "2", *words],
        env={
            "PYTHONPATH": os.pathsep.join(
                [str(Path.cwd()), str(Path(__file__).parents[1] / "support")]
            )
        },
    )
    assert result.returncode == errors.USER, result
    assert "the loss does not depend on" in result.stderr and "comm.reduce=auto" in result.stderr


@pytest.mark.in_turn
@needs_mpirun
def test_a_rank_that_fails_while_it_connects_ends_all(tmp_path: Path) -> None:
    """MPI runs by then, and would keep the others waiting."""
    wrong = (
        'if [ "$OMPI_COMM_WORLD_RANK" = 1 ]; then export GLOO_SOCKET_IFNAME=nosuch0; fi; exec "$@"'
    )
    words = [
        "sh",
        "-c",
        wrong,
        "sh",
        sys.executable,
        "-m",
        "hvdtrain",
        *DATA,
        "comm.engine=torchdist",
        f"run={tmp_path / 'run'}",
    ]
    result = mpirun(2, ["-c", "import os, sys; os.execvp(sys.argv[1], sys.argv[1:])", *words])
    assert result.returncode == errors.USER and "Traceback" not in result.stderr, result
    assert (
        "there is no such network interface\n  where: GLOO_SOCKET_IFNAME=nosuch0, rank 1 on "
        in result.stderr
    ), result


@pytest.mark.slow
@needs_extra("launch")
@pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("unshare"),
    reason="only root can take the names of hosts away from a process",
)
def test_addresses_without_a_host_name_are_no_warning(tmp_path: Path) -> None:
    """[W socket.cpp] [c10d] The hostname of the client socket cannot be retrieved: by each rank,
    where nothing resolves its address."""
    (tmp_path / "hosts").touch()
    (tmp_path / "resolv.conf").write_text("nameserver 127.0.0.99\noptions timeout:1 attempts:1\n")
    nameless = "".join(
        f"mount --bind {tmp_path / name} /etc/{name} && " for name in ("hosts", "resolv.conf")
    )
    words = [
        "--num-gpus",
        "2",
        "framework=numpy",
        "model.name=linear",
        "max_steps=3",
        f"run={tmp_path / 'run'}",
    ]
    command = [
        "unshare",
        "-m",
        "bash",
        "-c",
        f'{nameless} exec "$@"',
        "bash",
        sys.executable,
        "-m",
        "hvdtrain",
        *words,
    ]
    done = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=HANG_S, check=False
    )
    assert (done.returncode, done.stderr) == (0, ""), done


ENDS_AT_ONCE = """
import torch, torch.distributed as dist
from hvdtrain.comm import torchdist
from hvdtrain.comm.launcher_variables import NO_LAUNCHER
communicator = torchdist.connect(NO_LAUNCHER)
kept = dist.group.WORLD  # as FSDP2 does: Gloo's threads live to the end of the process
tensors = [torch.ones(30_000) for _ in range(3_000)]
for i, tensor in enumerate(tensors):
    communicator.start_allreduce(tensor, f"t{i}")  # nobody waits for it: its thread still works when the communicator closes
communicator.close()
"""  # noqa: E501


@pytest.mark.in_turn
def test_a_process_may_end_while_gloo_works() -> None:
    result = python(["-c", ENDS_AT_ONCE], is_warm=False)
    assert result.returncode == 0, result.stderr


@needs_mpirun
def test_ranks_with_and_without_nccl_agree_whether_one_may_be_lost() -> None:
    """All raise where one reduces by NCCL. None does for tensors in host memory, on a host with a
    GPU too."""
    said = "NCCL's collectives hang when a rank dies, and rank 1 reduces with NCCL"
    assert on_ranks("torchdist", 2, "nccl_on_ranks:ready", True) == [said, said]
    in_host_memory = on_ranks("torchdist", 2, "nccl_on_ranks:ready", False)
    # this MPI may have been started without ULFM
    assert in_host_memory[0] == in_host_memory[1] and "NCCL" not in in_host_memory[0]


def test_every_group_has_the_timeout_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's default is 30 minutes, and 10 with NCCL."""
    made: list[Any] = []
    new_group = dist.new_group

    def by_gloo(ranks: Any = None, timeout: Any = None, backend: Any = None, **options: Any) -> Any:
        made.append(new_group(ranks, timeout, "gloo", **options))
        return made[-1]

    monkeypatch.setattr(dist, "new_group", by_gloo)  # there is no GPU here
    ranks = torchdist.connect(NO_LAUNCHER, CommConfig(timeout_s=77))
    try:
        group: Any = ranks.split(0)
        for each in (cast(Any, ranks), group):
            each.device_messages(torch.device("cpu"))
        model = torch.nn.Linear(2, 1)
        config = configure(None, ["comm.engine=torchdist", "comm.reduce=ddp", "comm.timeout_s=77"])
        optimizer = torch.optim.SGD(model.parameters())
        named = list(model.named_parameters())
        strategy = select_strategy(config, one_group(ranks), named, optimizer, HostStopwatch())
        strategy.wrap(model, optimizer)
        timeouts = [each._get_backend(torch.device("cpu")).options._timeout for each in made]
    finally:
        ranks.close()
    assert timeouts == [timedelta(seconds=77)] * (1 + 2 * 2 + 1)


class _Ranks8192(torchdist.TorchDistCommunicator):
    """Rank 0, whose allgather repeats what it has for each rank."""

    def allgather(self, x: Any, name: str) -> Any:
        return np.tile(x, self.size)


@pytest.mark.timeout(40)
def test_objects_of_8192_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """3.8 kB of each, as facts of ranks are. Copying the rest for each rank moves 250 GB: 72 s in
    place of 0.4 s."""
    # all are of rank 0
    monkeypatch.setattr(
        torchdist, "unpack", lambda packed, secret, path: unpack(packed, secret, "0")
    )
    ranks = _Ranks8192(Placement(0, 8192, 0, 1, "srun"), None, None)
    assert ranks.allgather_object("a" * 3800) == ["a" * 3800] * 8192


def test_more_open_files_are_allowed_as_far_as_the_hard_limit_goes() -> None:
    code = """
import resource
from hvdtrain.comm.rendezvous import allow_open_files
resource.setrlimit(resource.RLIMIT_NOFILE, (300, 900))
limits = [resource.getrlimit(resource.RLIMIT_NOFILE)]
for ranks in (1, 4, 64, 8192, 2):
    allow_open_files(ranks)
    limits.append(resource.getrlimit(resource.RLIMIT_NOFILE))
print(limits)
"""
    result = python(["-c", code], is_warm=False)
    assert (
        result.stdout
        == "[(300, 900), (300, 900), (300, 900), (768, 900), (900, 900), (900, 900)]\n"
    ), result


@pytest.mark.in_turn
@needs_mpirun
@pytest.mark.parametrize("size", [2, 3])
def test_parts_go_in_one_call_as_on_nccl(size: int) -> None:
    """Rows that do not split evenly and ranks without a part too, of a type that NCCL lacks; ZeRO's
    weights are those of an allreduce."""
    assert min(on_ranks("torchdist", size, "one_call_on_ranks:conforms")) > 40
    for stage in (1, 2):
        assert max(on_ranks("torchdist", size, "one_call_on_ranks:farthest_weight", stage)) < 1e-15


class CountedRanks:
    """A group whose ranks are threads, or one whose other ranks send what they got."""

    def __init__(self, size: int, rank: ThreadRank | None = None) -> None:
        self.size = size
        self.exchanges = 0
        self._rank = rank

    def exchange(self, mine: torch.Tensor, distance: int, theirs: torch.Tensor) -> None:
        self.exchanges += 1
        if self._rank is None:
            theirs.copy_(mine)
            return
        sent = self._rank.start_send(mine, (self._rank.rank + distance) % self.size, "", distance)
        source = (self._rank.rank - distance) % self.size
        self._rank.start_recv(theirs, source, "", distance).wait()
        sent.wait()


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 13])
def test_the_extremes_of_ranks(size: int) -> None:
    def of_rank(rank: ThreadRank) -> tuple[list[int], list[int]]:
        # the largest of each number is another rank's
        mine = torch.tensor([(rank.rank + i) % size for i in range(size)] + [-rank.rank])
        least = mine.clone()
        extremes(mine, "max", CountedRanks(size, rank))
        extremes(least, "min", CountedRanks(size, rank))
        return mine.tolist(), least.tolist()

    assert in_threads(size, of_rank) == [([size - 1] * size + [0], [0] * size + [1 - size])] * size


@pytest.mark.parametrize(("size", "messages"), [(1, 0), (2, 1), (64, 6), (65, 7), (8192, 13)])
def test_extremes_take_few_messages_one_after_the_other(size: int, messages: int) -> None:
    """An allreduce of Gloo's takes 2 (size - 1), a ring."""
    ranks = CountedRanks(size)
    extremes(torch.tensor([1, -1]), "max", ranks)
    assert ranks.exchanges == messages


def connections_of_gloo(size: int) -> tuple[int, int]:
    """How many ends of connections this process has more once threads of it have made a group, and
    after their first allreduce."""
    store = dist.HashStore()
    before = len(list(_connected()))
    counts: list[int] = []
    barrier = threading.Barrier(size, timeout=HANG_S)

    def count(rank: int) -> None:
        """On one thread: those that look open files meanwhile."""
        barrier.wait()
        if rank == 0:
            counts.append(len(list(_connected())) - before)
        barrier.wait()

    def of_rank(rank: int) -> None:
        group: Any = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=HANG_S))
        count(rank)
        x = torch.ones(2)
        group.allreduce([x]).wait()
        assert x.tolist() == [size] * 2
        count(rank)

    with ThreadPoolExecutor(size) as pool:
        list(pool.map(of_rank, range(size)))
    made, used = counts
    return made, used


def test_beside_nccl_gloo_connects_ranks_when_they_first_communicate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both neighbours of a ring instead of all ranks, in each group."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "0")  # so that it is as before, afterwards
    assert connections_of_gloo(6) == (6 * 5, 6 * 5)
    monkeypatch.delenv("TORCH_GLOO_LAZY_INIT")
    connect_gloo_lazily(os.environ)
    assert connections_of_gloo(6) == (0, 6 * 2)
    environ = {"TORCH_GLOO_LAZY_INIT": "0"}
    connect_gloo_lazily(environ)
    assert environ == {"TORCH_GLOO_LAZY_INIT": "0"}, "the user decided"
