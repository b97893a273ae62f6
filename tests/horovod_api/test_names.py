"""The names of Horovod's module, those that are not built, and objects as data."""

from __future__ import annotations

import argparse
import importlib
from collections import Counter, OrderedDict, defaultdict, deque
from datetime import UTC, date, datetime, timedelta
from enum import Enum
from itertools import product
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import hvdtrain.horovod as hvd
from hvdtrain.errors import UserError
from hvdtrain.horovod.engine.connect import engine_name
from hvdtrain.horovod.engine.errors import BadCall
from hvdtrain.horovod.engine.settings import Settings, settings_of
from hvdtrain.horovod.object_forms import packed, unpacked

# What horovod.torch 0.28.1 exports.
NAMES = """Adasum Average Compression DistributedOptimizer HorovodInternalError Max Min ProcessSet Product Sum SyncBatchNorm add_process_set
allgather allgather_async allgather_object allreduce allreduce_ allreduce_async allreduce_async_ alltoall alltoall_async barrier broadcast
broadcast_ broadcast_async broadcast_async_ broadcast_object broadcast_optimizer_state broadcast_parameters ccl_built cross_rank cross_size
cuda_built ddl_built elastic global_process_set gloo_built gloo_enabled grouped_allgather grouped_allgather_async grouped_allreduce
grouped_allreduce_ grouped_allreduce_async grouped_allreduce_async_ grouped_reducescatter grouped_reducescatter_async init is_homogeneous
is_initialized join local_rank local_size mpi_built mpi_enabled mpi_threads_supported nccl_built poll rank reducescatter
reducescatter_async remove_process_set rocm_built shutdown size sparse_allreduce_async start_timeline stop_timeline synchronize"""


@pytest.mark.parametrize("module", ["hvdtrain.horovod", "hvdtrain.horovod.torch"])
def test_every_name_is_there(module: str) -> None:
    assert [name for name in NAMES.split() if not hasattr(importlib.import_module(module), name)] == []


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("mpi_ops", "allreduce_async_ poll size Average"),
        ("functions", "broadcast_object broadcast_parameters broadcast_optimizer_state allgather_object"),
        ("compression", "Compression Compressor FP16Compressor NoneCompressor"),
        ("optimizer", "DistributedOptimizer"),
        ("sync_batch_norm", "SyncBatchNorm"),
        ("elastic", "run init shutdown TorchState ElasticSampler"),
        ("elastic.state", "TorchState ObjectState State"),
        ("elastic.sampler", "ElasticSampler"),
    ],
)
def test_modules_inside_have_the_same_objects(module: str, names: str) -> None:
    found = importlib.import_module(f"hvdtrain.horovod.torch.{module}")
    for name in names.split():
        expected = getattr(hvd, name, None) or getattr(hvd.elastic, name, None)
        assert hasattr(found, name) and (expected is None or getattr(found, name) is expected), name


def test_a_name_that_is_not_built_says_so() -> None:
    with pytest.raises(AttributeError, match="hvdtrain.horovod has no 'run': docs/horovod-api.md lists what it has"):
        hvd.run  # noqa: B018


@pytest.mark.parametrize("module", ["keras", "tensorflow"])
def test_other_frameworks_say_what_to_use(module: str) -> None:
    with pytest.raises(ImportError, match=f"hvdtrain.horovod.{module} is not built\n  fix: .*import hvdtrain.horovod as hvd"):
        importlib.import_module(f"hvdtrain.horovod.{module}")


def test_calls_before_init_say_so() -> None:
    with pytest.raises(ValueError, match="Horovod has not been initialized; use hvd.init()."):
        hvd.rank()


class Pair(NamedTuple):
    one: int
    other: list[Any]


class Colour(Enum):
    RED = 1


THINGS: list[Any] = [
    {"a": [1, 2.5, None, True, "text"], 3: (b"\x00\xff", 1 + 2j), (1, 2): {4, 5}},
    OrderedDict([("z", frozenset({1})), ("a", np.float32(2.5))]),
    [Counter("aab"), defaultdict(list, a=[1]), deque([1, 2], maxlen=3), bytearray(b"x"), range(1, 9, 2), slice(None, 3)],
    [Path("/a/b"), PurePosixPath("c"), Pair(1, [Path("d")]), Colour.RED, SimpleNamespace(a=1), np.int64(3), np.bool_(True)],
    [datetime(2026, 11, 24, 1, 2, 3, 4, UTC), date(2026, 11, 24), timedelta(days=-1, seconds=5)],
    torch.optim.lr_scheduler.MultiStepLR(torch.optim.SGD([torch.ones(1)]), [2, 2, 5]).state_dict(),
    argparse.Namespace(lr=0.1, layers=[1, 2]),
    [torch.float16, torch.Size([2, 3]), torch.device("cpu")],
    np.arange(6).reshape(2, 3),
    float("inf"),
]


@pytest.mark.parametrize("thing", THINGS, ids=lambda thing: type(thing).__name__)
def test_objects_come_back_equal_and_of_the_same_classes(thing: Any) -> None:
    found = unpacked(packed(thing, "test"))
    assert type(found) is type(thing) and repr(found) == repr(thing)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.int8])
def test_tensors_come_back_equal(dtype: torch.dtype) -> None:
    for tensor in (torch.arange(6).reshape(2, 3).to(dtype), torch.ones((), dtype=dtype), torch.ones(0, 2, dtype=dtype)):
        found = unpacked(packed({"x": tensor}, "test"))["x"]
        assert found.dtype == dtype and found.shape == tensor.shape and bool((found == tensor).all())


class Own:
    """Of a class that no other rank may know."""


def test_an_object_of_ones_own_class_is_refused_with_what_to_send_instead() -> None:
    with pytest.raises(BadCall, match="an object of .*Own is not sent to other ranks") as raised:
        packed([Own()], "broadcast_object 'x'")
    assert "numbers, strings, bytes" in raised.value.fix and raised.value.where == "broadcast_object 'x'"


def test_what_is_refused_is_named_with_its_place() -> None:
    for thing, words in (
        ({"a": [1, Own()]}, r"Own is not sent .*, at object\['a'\]\[1\]"),
        ({"a": defaultdict(lambda: 1)}, r"a defaultdict of <function .* is not sent to other ranks, at object\['a'\]"),
        ([torch.eye(2).to_sparse()], r"(?s:torch.Tensor is not sent .*), at object\[0\]"),
    ):
        with pytest.raises(BadCall, match=words):
            packed(thing, "test")


def test_a_class_that_this_process_has_not_loaded_is_an_error() -> None:
    kind: Any = type("Elsewhere", (Pair,), {"__module__": "elsewhere"})
    with pytest.raises(BadCall, match="this rank has not loaded the class elsewhere.Elsewhere"):
        unpacked(packed(kind(1, []), "test"))


def test_settings_are_horovods_variables() -> None:
    assert settings_of({}) == Settings()
    found = settings_of({"HOROVOD_FUSION_THRESHOLD": "1000", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "0"})
    assert found.fusion_bytes == 1000 and found.end_s is None and found.warn_s == 60
    assert settings_of({"HOROVOD_STALL_CHECK_DISABLE": "1"}).warn_s is None
    for key, value in product(("HOROVOD_FUSION_THRESHOLD", "HOROVOD_STALL_CHECK_TIME_SECONDS"), ("much", "nan", "-1", "")):
        with pytest.raises(UserError, match=f"{key}='{value}' is not a number of 0 or more\n.*\n  fix: a number; 0 switches it off"):
            settings_of({key: value})
    with pytest.raises(UserError, match="HOROVOD_FUSION_THRESHOLD='inf' is not a number of 0 or more\n.*\n  fix: a number of bytes"):
        settings_of({"HOROVOD_FUSION_THRESHOLD": "inf"})


def test_process_sets_that_are_none_are_refused_before_ranks_connect() -> None:
    for wrong in ("dynamik", [[0, 1]]):
        with pytest.raises(BadCall, match="is no process set\n.*\n  fix: .*hvd.ProcessSet"):
            hvd.init(process_sets=wrong)  # type: ignore[arg-type]
    assert not hvd.is_initialized()


def test_an_unknown_engine_is_an_error_with_the_nearest() -> None:
    from hvdtrain.comm.placement import NO_LAUNCHER

    assert engine_name({}, NO_LAUNCHER) == "single"
    with pytest.raises(UserError, match="HVDTRAIN_ENGINE='mpii' is no engine"):
        engine_name({"HVDTRAIN_ENGINE": "mpii"}, NO_LAUNCHER)
