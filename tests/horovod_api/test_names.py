"""The names of Horovod's module, those that are not built, and its variables."""

from __future__ import annotations

import importlib
from itertools import product

import pytest
import ranks

import hvdtrain.horovod as hvd
from hvdtrain.errors import UserError
from hvdtrain.horovod.engine.errors import BadCall
from hvdtrain.horovod.engine.settings import Settings, settings_of
from hvdtrain.horovod.job import engine_name

# What horovod.torch 0.28.1 exports.
NAMES = """Adasum Average Compression DistributedOptimizer HorovodInternalError Max Min ProcessSet Product Sum SyncBatchNorm add_process_set
allgather allgather_async allgather_object allreduce allreduce_ allreduce_async allreduce_async_ alltoall alltoall_async barrier broadcast
broadcast_ broadcast_async broadcast_async_ broadcast_object broadcast_optimizer_state broadcast_parameters ccl_built cross_rank cross_size
cuda_built ddl_built elastic global_process_set gloo_built gloo_enabled grouped_allgather grouped_allgather_async grouped_allreduce
grouped_allreduce_ grouped_allreduce_async grouped_allreduce_async_ grouped_reducescatter grouped_reducescatter_async init is_homogeneous
is_initialized join local_rank local_size mpi_built mpi_enabled mpi_threads_supported nccl_built poll rank reducescatter
reducescatter_async remove_process_set rocm_built shutdown size sparse_allreduce_async start_timeline stop_timeline synchronize"""  # noqa: E501


@pytest.mark.parametrize("module", ["hvdtrain.horovod", "hvdtrain.horovod.torch"])
def test_every_name_is_there(module: str) -> None:
    assert [
        name for name in NAMES.split() if not hasattr(importlib.import_module(module), name)
    ] == []


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("mpi_ops", "allreduce_async_ poll size Average"),
        (
            "functions",
            "broadcast_object broadcast_parameters broadcast_optimizer_state allgather_object",
        ),
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


MODULES = "compression functions mpi_ops optimizer sync_batch_norm elastic.sampler elastic.state"


@pytest.mark.parametrize(
    "package", ["hvdtrain.horovod", "hvdtrain.horovod.torch", "hvdtrain.horovod.torch.elastic"]
)
def test_modules_inside_are_attributes(package: str) -> None:
    """As pytorch-ignite takes hvd.mpi_ops.Sum; in a new process, where nothing else has imported
    them."""
    names = MODULES.split() if not package.endswith("elastic") else ["sampler", "state"]
    taken = "; ".join(f"hvd.{name}" for name in names)
    own = (
        "hvd.mpi_ops.Sum is hvd.Sum and hvd.functions.broadcast_object is hvd.broadcast_object"
        if len(names) > 2
        else "hvd.TorchState"
    )
    result = ranks.python(["-c", f"import {package} as hvd; {taken}; assert {own}"])
    assert (result.returncode, result.stderr) == (0, "")


def test_extensions_that_are_not_needed_are_there() -> None:
    hvd.check_extension("horovod.torch", "HOROVOD_WITH_PYTORCH", __file__, "mpi_lib_v2")
    hvd.check_extension("horovod.tensorflow", "HOROVOD_WITH_TENSORFLOW", __file__, "mpi_lib")
    with pytest.raises(ImportError, match="Extension horovod.mxnet has not been built"):
        hvd.check_extension("horovod.mxnet", "HOROVOD_WITH_MXNET", __file__, "mpi_lib")


def test_a_name_that_is_not_built_says_so() -> None:
    with pytest.raises(
        AttributeError,
        match="hvdtrain.horovod has no 'vars': docs/horovod-api.md lists what it has",
    ):
        hvd.vars  # noqa: B018


@pytest.mark.parametrize("name", ["run", "runner", "spark", "ray", "mxnet"])
def test_a_part_of_horovod_that_is_not_built_says_what_to_use_instead(name: str) -> None:
    text = f"hvdtrain.horovod.{name} is not built: .*\n  fix: .*"
    with pytest.raises(AttributeError, match=text):
        getattr(hvd, name)
    if name != "run":
        with pytest.raises(ImportError, match=text):
            importlib.import_module(f"hvdtrain.horovod.{name}")
        with pytest.raises(ImportError, match=text):
            importlib.import_module(f"hvdtrain.horovod.{name}.torch")


def test_scripts_that_import_from_horovod_common_get_the_same_objects() -> None:
    common = {
        "exceptions": "HorovodInternalError HostsUpdatedInterrupt HorovodVersionMismatchError",
        "process_sets": "ProcessSet add_process_set global_process_set remove_process_set",
        "util": "check_extension mpi_built nccl_built",
        "elastic": "ObjectState State",
    }
    for module, names in common.items():
        found = importlib.import_module(f"hvdtrain.horovod.common.{module}")
        for name in names.split():
            expected = getattr(hvd, name, None) or getattr(hvd.elastic, name, None)
            assert hasattr(found, name) and (
                expected is None or getattr(found, name) is expected
            ), name
    mismatch = importlib.import_module(
        "hvdtrain.horovod.common.exceptions"
    ).HorovodVersionMismatchError("torch", "2.0", "1.0")
    assert isinstance(mismatch, ImportError)
    assert (mismatch.name, mismatch.version, mismatch.installed_version) == ("torch", "2.0", "1.0")


@pytest.mark.parametrize(
    ("module", "package"),
    [("keras", "keras"), ("tensorflow", "tensorflow"), ("tensorflow.keras", "tensorflow")],
)
def test_a_framework_that_is_not_installed_is_named_with_the_line_to_type(
    module: str, package: str
) -> None:
    result = ranks.python(
        ["-c", f"import sys; sys.modules['{package}'] = None; import hvdtrain.horovod.{module}"]
    )
    assert result.returncode != 0
    assert (
        f"needs {'Keras 3' if package == 'keras' else 'TensorFlow'}\n  fix: pip install "
        f"'hvdtrain[{package}]'" in result.stderr
    )


def test_calls_before_init_say_so() -> None:
    with pytest.raises(ValueError, match="Horovod has not been initialized; use hvd.init()."):
        hvd.rank()


def test_settings_are_horovods_variables() -> None:
    assert settings_of({}) == Settings()
    found = settings_of(
        {"HOROVOD_FUSION_THRESHOLD": "1000", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "0"}
    )
    assert found.fusion_bytes == 1000 and found.end_s is None and found.warn_s == 60
    assert settings_of({"HOROVOD_STALL_CHECK_DISABLE": "1"}).warn_s is None
    for key, value in product(
        ("HOROVOD_FUSION_THRESHOLD", "HOROVOD_STALL_CHECK_TIME_SECONDS"), ("much", "nan", "-1", "")
    ):
        with pytest.raises(
            UserError,
            match=f"{key}='{value}' is not a number of 0 or more\n.*\n  fix: a number; 0 switches "
            "it off",
        ):
            settings_of({key: value})
    with pytest.raises(
        UserError,
        match="HOROVOD_FUSION_THRESHOLD='inf' is not a number of 0 or more\n.*\n  fix: a number "
        "of bytes",
    ):
        settings_of({"HOROVOD_FUSION_THRESHOLD": "inf"})


def test_process_sets_that_are_none_are_refused_before_ranks_connect() -> None:
    for wrong in ("dynamik", [[0, 1]]):
        with pytest.raises(BadCall, match="is not a process set\n.*\n  fix: .*hvd.ProcessSet"):
            hvd.init(process_sets=wrong)  # type: ignore[arg-type]
    assert not hvd.is_initialized()


def test_an_unknown_engine_is_an_error_with_the_nearest() -> None:
    from hvdtrain.comm.launcher_variables import NO_LAUNCHER

    assert engine_name({}, NO_LAUNCHER) == "single"
    with pytest.raises(UserError, match="HVDTRAIN_ENGINE='mpii' is not an engine"):
        engine_name({"HVDTRAIN_ENGINE": "mpii"}, NO_LAUNCHER)
