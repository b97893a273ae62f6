"""Objects that ranks send each other: what comes back, and that nothing is unpickled which the job
has not signed."""

from __future__ import annotations

import contextlib
import dataclasses
import pickle
import random
import sys
from collections import Counter, OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable
from datetime import UTC, datetime
from decimal import Decimal
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pytest
import torch
from ports import free_port
from ranks import Job

from hvdtrain.comm.communicator import SingleProcessCommunicator
from hvdtrain.comm.launcher_variables import Placement
from hvdtrain.comm.signed import pack, sign
from hvdtrain.comm.torchdist import TorchDistCommunicator
from hvdtrain.horovod import objects, parameters
from hvdtrain.horovod.engine.errors import BadCall
from hvdtrain.horovod.engine.own import OwnEngine
from hvdtrain.horovod.engine.settings import Settings
from hvdtrain.horovod.objects import from_bytes, to_bytes

MPI = None  # what Engine.secret is where no stranger reaches the connection
UNSIGNED = ""


def sent(thing: Any, secret: str | None) -> Any:
    return from_bytes(to_bytes(thing, secret, "x of rank 0", "test"), secret, "x of rank 0", "test")


class Pair(NamedTuple):
    one: int
    other: list[Any]


class Colour(Enum):
    RED = 1


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    path: Path
    made: list[str]

    def __post_init__(self) -> None:
        self.made.append("made")


DATA: list[Any] = [
    {"a": [1, 2.5, None, True, "text"], 3: b"\x00\xff", (1, 2): {4, 5}, np.int64(1): 5},
    OrderedDict([("z", Path("/a/b")), ("a", np.float32(2.5))]),
    [np.int64(3), np.bool_(True), np.datetime64("2026-11-24")],
    torch.optim.lr_scheduler.MultiStepLR(torch.optim.SGD([torch.ones(1)]), [2, 5]).state_dict()
    | {"milestones": [2, 5]},
    np.arange(6).reshape(2, 3),
    np.array(["a", "bc"]),
    float("inf"),
    [range(3), range(5, -4, -2), frozenset({1}), complex(-0.0, float("inf")), bytearray(b"\x00x")],
    [Counter("aab"), Counter({(1, "x"): 2}), torch.Size([2, 3]), {range(2): frozenset()}],
    [torch.float32, torch.bfloat16, torch.float8_e5m2, torch.device("cuda:1"), torch.device("cpu")],
    torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16), requires_grad=False),
    [torch.nn.Parameter(torch.arange(4.0).view(2, 2))],
    torch.optim.lr_scheduler.MultiStepLR(torch.optim.SGD([torch.ones(1)]), [2, 5]).state_dict(),
]
OBJECTS: list[Any] = [
    [Counter("aab"), defaultdict(list, a=[1]), deque([1], maxlen=3), bytearray(b"x"), 1 + 2j],
    [Pair(1, [Path("d")]), Colour.RED, SimpleNamespace(a=1), Decimal("1.50"), slice(None, 3)],
    [datetime(2026, 11, 24, 1, 2, 3, 4, UTC), torch.float16, torch.Size([2, 3])],
    [Frozen(Path("a"), []), UserDict(a=1), len, int],
    np.array([(1, (2.0, 3.0))], [("a", ">i4"), ("b", "f8", (2,))]),
    np.ma.array([[1, 2], [3, 4]], mask=[[False, True], [False, False]], fill_value=7),
    torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16), requires_grad=False),
    torch.tensor([[0.0, 1.0]]).to_sparse(),
]


@pytest.mark.parametrize("secret", [MPI, "s", UNSIGNED])
@pytest.mark.parametrize("thing", DATA, ids=lambda thing: type(thing).__name__)
def test_data_comes_back_equal_and_of_the_same_classes(thing: Any, secret: str | None) -> None:
    found = sent(thing, secret)
    assert type(found) is type(thing) and repr(found) == repr(thing)


@pytest.mark.parametrize("secret", [MPI, "s"])
@pytest.mark.parametrize("thing", OBJECTS, ids=lambda thing: type(thing).__name__)
def test_objects_come_back_equal_and_of_the_same_classes(thing: Any, secret: str | None) -> None:
    found = sent(thing, secret)
    assert type(found) is type(thing) and repr(found) == repr(thing)
    assert getattr(found, "dtype", None) == getattr(thing, "dtype", None)


@pytest.mark.parametrize("secret", [MPI, UNSIGNED])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.int8]
)
def test_tensors_come_back_equal(dtype: torch.dtype, secret: str | None) -> None:
    for tensor in (
        torch.arange(6).reshape(2, 3).to(dtype),
        torch.ones((), dtype=dtype),
        torch.ones(0, 2, dtype=dtype),
    ):
        found = sent({"x": tensor}, secret)["x"]
        assert (
            found.dtype == dtype and found.shape == tensor.shape and bool((found == tensor).all())
        )
    leaf = sent(torch.ones(2, requires_grad=True), secret)
    assert leaf.requires_grad and leaf.is_leaf


def test_the_versions_in_a_state_dict_come_back() -> None:
    state = torch.nn.BatchNorm1d(2).state_dict()
    for secret in (MPI, UNSIGNED):
        found: Any = sent(state, secret)
        assert list(found) == list(state) and found._metadata == {"": {"version": 2}}


def test_of_a_view_only_its_own_numbers_are_sent() -> None:
    assert len(to_bytes(torch.ones(100_000)[:2], MPI, "", "")) < 2000


@pytest.mark.parametrize(
    ("generator", "draw"),
    [
        (np.random.default_rng(3), lambda found: (found.random(), found.spawn(1)[0].random())),
        (np.random.RandomState(3), lambda found: found.randn(3).tolist()),
        (random.Random(3), lambda found: found.random()),
    ],
    ids=lambda each: type(each).__name__,
)
def test_generators_go_on_from_where_they_are(generator: Any, draw: Callable[[Any], Any]) -> None:
    draw(generator)
    found = sent(generator, MPI)
    assert type(found) is type(generator) and draw(found) == draw(generator)


def test_no_constructor_of_a_dataclass_runs_again() -> None:
    assert sent(Frozen(Path("a"), []), "s").made == ["made"]


def test_tables_come_back_with_their_dtypes() -> None:
    days = pd.to_datetime(["2020-01-01", "2021-01-01"]).tz_localize("Europe/Berlin")
    table = pd.DataFrame({"text": ["x", None], "kind": pd.Categorical(["u", "v"]), "day": days})
    table.attrs["source"] = "test"
    found = sent(table, MPI)
    pd.testing.assert_frame_equal(found, table)
    assert found.attrs == table.attrs


class Own:
    """Of a class that pickle alone takes."""


def test_without_a_secret_objects_are_refused_where_they_are_sent() -> None:
    for thing, words in (
        (
            {"a": [1, Own()]},
            r"Own cannot be sent over an unsigned connection.*, at object\['a'\]\[1\]",
        ),
        ([Frozen(Path("a"), [])], "Frozen cannot be sent over an unsigned"),
        (np.array([None]), "ndarray cannot be sent"),
        (np.zeros(1, [("a", "f8")]), "ndarray cannot be sent"),
        (defaultdict(list), "defaultdict cannot be sent"),
        (
            {"a": [torch.nn.Parameter(torch.eye(2).to_sparse())]},
            r"(?s)Tensor cannot be sent .*, at object\['a'\]\[0\]\n",
        ),
        (torch.eye(2).to_sparse(), "Tensor cannot be sent"),
        (lambda: 1, "function cannot be sent"),
    ):
        with pytest.raises(BadCall, match=words) as raised:
            to_bytes(thing, UNSIGNED, "x", "broadcast_object 'x'")
        assert raised.value.fix.startswith("give every rank the same HVDTRAIN_SECRET, or use MPI")
        assert raised.value.where == "broadcast_object 'x'"


class Runs:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self._path,)


HOSTILE: dict[str, Callable[[bytes], bytes]] = {
    "unsigned": lambda pickled: pickled,
    "of another secret": lambda pickled: sign(pickled, "other", "x of rank 0"),
    "of no secret": lambda pickled: sign(pickled, "", "x of rank 0"),
    "of another rank": lambda pickled: sign(pickled, "s", "x of rank 1"),
    "of another call": lambda pickled: sign(pickled, "s", "y of rank 0"),
    "changed": lambda pickled: sign(pickled, "s", "x of rank 0") + b".",
    "its signature alone": lambda pickled: sign(pickled, "s", "x of rank 0")[:32],
    "nothing": lambda pickled: b"",
}


@pytest.mark.parametrize("how", HOSTILE)
def test_what_the_job_has_not_signed_is_refused_before_it_is_unpickled(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = tmp_path / "ran"
    content = HOSTILE[how](pickle.dumps(Runs(made)))
    for secret in ("s", UNSIGNED):
        with pytest.raises(BadCall, match="x of rank 0 is not signed with the job's secret"):
            from_bytes(content, secret, "x of rank 0", "test")
    assert not made.exists()
    from_bytes(sign(pickle.dumps(Runs(made)), "s", "x of rank 0"), "s", "x of rank 0", "test")
    assert made.exists()  # as it would have been


def test_a_job_without_a_secret_unpickles_nothing(tmp_path: Path) -> None:
    made = tmp_path / "ran"
    content = sign(pickle.dumps(Runs(made)), "", "x")  # as every stranger can sign
    with pytest.raises(BadCall, match="x is not signed with the job's secret\n.*\n  fix: give eve"):
        from_bytes(content, UNSIGNED, "x", "test")
    assert not made.exists()


def test_a_class_that_this_rank_does_not_have_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    content = to_bytes(Own(), MPI, "x of rank 1", "test")
    monkeypatch.delattr(sys.modules[__name__], "Own")
    with pytest.raises(BadCall, match="this rank cannot load the object of x of rank 1: .*'Own'"):
        from_bytes(content, MPI, "x of rank 1", "test")


class Refused(Exception):
    """pickle.loads() calls it with one argument."""

    def __init__(self, what: str, where: str) -> None:
        super().__init__(what)
        self.where = where


def test_an_object_that_cannot_be_made_again_is_an_error_of_its_call() -> None:
    for secret in (MPI, "s"):
        with pytest.raises(
            BadCall, match="cannot load the object of x of rank 0: TypeError: .*Ref"
        ):
            sent({"last": Refused("a", "b")}, secret)


INTEGER = np.zeros(2, np.uint8)
DAMAGED: list[Any] = [
    objects._Tensor("float32", INTEGER, (1,), False),  # half a number
    objects._Tensor("int8", INTEGER, (3,), False),
    objects._Tensor("int8", INTEGER, (2,), True),
    objects._Tensor("save", INTEGER, (2,), False),
    objects._Tensor("no_such_type", INTEGER, (2,), False),
    objects._Tensor(5, INTEGER, (2,), False),  # type: ignore[arg-type]
    objects._Made("bytes", "x"),
    objects._Made("bytearray", 10**12),
    objects._Made("set", [[1]]),
    objects._Made("set", objects._Made("range", [0, 10**12, 1])),
    objects._Made("dtype", "save"),
    objects._Made("device", "no such device"),
    objects._Made("list", []),
    objects._Scalar([1]),  # type: ignore[arg-type]
    objects._Dict([1], None),
    objects._Dict([([], 1)], None),
    objects._Dict([], 5),  # type: ignore[arg-type]
]


@pytest.mark.parametrize("thing", DAMAGED, ids=repr)
def test_data_that_no_rank_makes_is_not_of_the_job(thing: Any) -> None:
    """Without a secret a stranger can sign it."""
    for content in (pack(thing, "", "x"), pack({"a": [thing]}, "", "x")):
        with pytest.raises(BadCall, match="x is not signed with the job's secret\n.*\n  fix: give"):
            from_bytes(content, UNSIGNED, "x", "test")


@pytest.mark.parametrize(
    "text",
    ['{"array": ["f4", [1e999], ""]}', f'{{"array": ["u1", [{10**30}], "AA=="]}}', "[" * 9**5],
)
def test_text_that_no_rank_writes_is_not_of_the_job(text: str) -> None:
    with pytest.raises(BadCall, match="x is not signed with the job's secret"):
        from_bytes(sign(text.encode(), "", "x"), UNSIGNED, "x", "test")


@pytest.mark.parametrize(("secret", "unsent"), [(MPI, ["scale"]), (UNSIGNED, ["by_name", "scale"])])
def test_a_setting_of_an_optimizer_that_is_not_sent_is_said(
    secret: str | None,
    unsent: list[str],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(parameters.JOB, "_engine", SimpleNamespace(secret=secret))
    settings = {"lr": 0.5, "by_name": max, "range": range(3), "scale": lambda step: step}
    groups = [{"params": [0]}, {"params": [1], **settings}]
    found = parameters._without_tensors({"state": {}, "param_groups": groups})["param_groups"]
    assert found[0] == groups[0]
    assert found[1].keys() == groups[1].keys() - set(unsent)
    said = capfd.readouterr().err.splitlines()
    assert [line.partition(", of ")[0] for line in said] == [
        f"hvdtrain.horovod: broadcast_optimizer_state does not send param_groups[1]['{key}']"
        for key in unsent
    ]


def test_which_connections_are_signed() -> None:
    place = Placement(0, 2, 0, 2, "torchrun")

    class Two(SingleProcessCommunicator):
        size = 2

    assert TorchDistCommunicator(place, None, None, "s").secret == "s"
    assert TorchDistCommunicator(place, None, None).secret == ""
    for secret, size, expected in (("s", 2, "s"), ("", 2, ""), (None, 2, None), ("", 1, None)):
        engine = OwnEngine(SingleProcessCommunicator(), Settings())
        engine._communicator = Two()
        engine._communicator.secret = secret
        engine.size = size
        assert engine.secret == expected


ON_TWO_RANKS = """
import dataclasses
import torch
import hvdtrain.horovod as hvd
@dataclasses.dataclass
class Known:
    rank: int
hvd.init()
try:
    print([each.rank for each in hvd.allgather_object(Known(hvd.rank()))])
except ValueError as error:
    print(str(error).splitlines()[0])
print(hvd.broadcast_object({"x": torch.arange(3), "n": {1, 2}} if hvd.rank() == 1 else None, 1))
net = torch.nn.Linear(2, 1)
optimizer = torch.optim.Adam(net.parameters(), lr=0.1 * (hvd.rank() + 1))
net(torch.ones(1, 2)).sum().backward()
if hvd.rank() == 0:
    optimizer.step()
hvd.broadcast_optimizer_state(optimizer, 0)
print(optimizer.param_groups[0]["lr"], len(optimizer.state))
"""


@pytest.mark.parametrize("secret", ["of the test", UNSIGNED])
def test_two_ranks_without_mpi_send_objects_where_the_job_has_a_secret(secret: str) -> None:
    """What the trainer of a script needs itself is sent without one too."""
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "HVDTRAIN_SECRET": secret,
        "HVDTRAIN_ENGINE": "torchdist",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
    }
    with contextlib.ExitStack() as stack:
        each = [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
        jobs = [
            stack.enter_context(Job(0, ["-c", ON_TWO_RANKS], env=env, is_warm=True)) for env in each
        ]
        results = [job.wait() for job in jobs]
    for result in results:
        first, *others = result.stdout.splitlines()
        if secret:
            assert first == "[0, 1]", result.stderr
        else:
            assert first.startswith("rank 0: an object of __main__.Known cannot be sent over an")
        assert others == ["{'x': tensor([0, 1, 2]), 'n': {1, 2}}", "0.1 2"], result.stderr
