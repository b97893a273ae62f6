"""Fixtures for tests of several folders."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import os
import posix
import re
import signal
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
import rotation
import warm
from extras_in_turn import extras_of_today, is_of_extras, unknown_extras
from ranks import environment
from record import note
from without_extra import names_of_extras

# marks by which the Makefile chooses tests; without one of them: `make test`
PARTS = (
    "slow",
    "faults",
    "cluster",
    "gpu",
    "simulated_gpu",
    "clock",
)
# A worker takes file after file (--dist loadfile), so the ones that take longest come first: at the
# end all others would wait for them.
LONGEST = (
    "test_labs.py",
    "test_tutorials.py",
    "test_invariance.py",
    "test_resume.py",
    "test_elastic_jobs.py",
    "test_faults_ends.py",
    "test_shard_stages.py",
)


def pytest_configure(config: pytest.Config) -> None:
    """All but `-m gpu` compute on the CPU, also where there is a GPU.

    A shell that starts this in the background has it ignore SIGINT, and what tests start would,
    too.
    """
    if config.option.markexpr != "gpu":
        os.environ |= {"CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu"}
        if os.environ.get("HVDTRAIN_TEST_ROUNDS") != "full":  # compiles a third faster
            os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    if rotation.is_by_day() and not os.environ.get("PYTEST_XDIST_WORKER"):  # it chooses for them
        os.environ["HVDTRAIN_TEST_DAY"] = rotation.today().isoformat()
        if "HVDTRAIN_TEST_EXTRAS" not in os.environ:  # else this repeats a run
            os.environ["HVDTRAIN_TEST_EXTRAS"] = " ".join(extras_of_today())
        if unknown := unknown_extras(os.environ["HVDTRAIN_TEST_EXTRAS"].split()):
            raise pytest.UsageError(
                f"HVDTRAIN_TEST_EXTRAS names {', '.join(unknown)}, which is not an extra; there "
                f"are: {', '.join(names_of_extras())}"
            )
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.getoption("numprocesses", None):
        warm.start(environment())  # one for all workers, which start meanwhile
    if os.environ.get("PYTEST_XDIST_WORKER"):
        _tell_who_ends_this_process()


def pytest_report_header() -> str | None:
    """What repeats a run by day."""
    if not rotation.is_by_day():
        return None
    return " ".join(
        f"{name}={os.environ[name]!r}"
        for name in ("HVDTRAIN_TEST_ROUNDS", "HVDTRAIN_TEST_DAY", "HVDTRAIN_TEST_EXTRAS")
    )


def _tell_who_ends_this_process() -> None:
    """Where code that a test runs ends this worker, by os._exit() or in C, the tracebacks of all
    threads are on the standard error."""
    # at this moment pytest does not take what is written to it
    stderr = os.dup(2)
    worker = os.getpid()
    leave = os._exit

    def leave_with_a_traceback(status: int) -> NoReturn:
        if os.getpid() == worker:  # not a fork of it
            faulthandler.dump_traceback(stderr)
        leave(status)

    # so that pickle names it as before
    leave_with_a_traceback.__module__ = "posix"
    leave_with_a_traceback.__qualname__ = "_exit"
    os._exit = posix._exit = leave_with_a_traceback  # type: ignore[assignment]
    libc = ctypes.CDLL(None)
    if hasattr(
        libc, "on_exit"
    ):  # glibc: exit(STATUS) calls raise(STATUS); raise(0) does nothing, and 1 is SIGHUP
        faulthandler.register(signal.SIGHUP, stderr)
        libc.on_exit(libc["raise"], None)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `-m "faults"`, or `-m "slow and not faults"`: a file without that mark is not imported,
    which saves each worker 10 s; nor are tests of extras that are not tested today."""
    if (
        rotation.is_by_day()
        and collection_path.match(rotation.FILES_OF_EXTRAS)
        and not is_of_extras(collection_path, os.environ["HVDTRAIN_TEST_EXTRAS"].split())
    ):
        return True
    expression = str(config.option.markexpr)
    wanted = [word for word in expression.split(" and ") if word in PARTS]
    if " or " in expression or not wanted or not collection_path.name.startswith("test_"):
        return None
    return any(not _names(collection_path, mark) for mark in wanted) or None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """The tests and the libraries that they import are a million objects, which stay: a search for
    garbage among them takes half a second of a core."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The longest files first, and of what is marked `in_turn` the tests of today; and the hook
    above would leave out a test whose mark is written in another file."""
    config.stash[rotation.COLLECTED] = list(items)
    if rotation.is_by_day():
        others = rotation.items_of_other_days(items, rotation.today())
        config.hook.pytest_deselected(items=list(others))
        items[:] = [item for item in items if item not in others]
    items.sort(
        key=lambda item: (
            LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST)
        )
    )
    for item in items:
        for mark in PARTS:
            if item.get_closest_marker(mark) and not _names(item.path, mark):
                raise pytest.UsageError(
                    f"{item.nodeid} is marked {mark} by another file: write `pytest.mark.{mark}` "
                    "in its own"
                )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A report has the seconds of a core that this process and those that it waited for have taken
    since the report before."""
    report = yield
    report.cpu_s = sum(os.times()[:4]) - _CPU_S[0]  # type: ignore[attr-defined]
    _CPU_S[0] += report.cpu_s  # type: ignore[attr-defined]
    return report


_CPU_S = [0.0]  # at the report before


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Here alone, not in a worker too, which hands its reports over."""
    if not os.environ.get("PYTEST_XDIST_WORKER"):
        note(
            {
                "test": report.nodeid,
                "seconds": report.duration,
                "cpu_s": getattr(report, "cpu_s", 0.0),
                "outcome": report.outcome,
            }
        )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None]:
    """No test starts MPI in this process: tests in threads and forks follow in it, and MPI may end
    it at any time."""
    before = _runs_mpi()
    yield
    assert before or not _runs_mpi(), (
        "this test has started MPI in the process of all tests: pool.on_ranks() has its own"
    )


def _runs_mpi() -> bool:
    mpi = sys.modules.get("mpi4py.MPI")
    return bool(mpi and mpi.Is_initialized())


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Says how a worker ended that should not have: by a signal (a negative status) or by itself.
    pytest-xdist does not say it."""
    if error:
        status = node.gateway._io.popen.wait(10)
        print(f"\n{node.gateway.id} ended with status {status}", file=sys.stderr, flush=True)


def pytest_sessionfinish() -> None:
    """Ranks that wait for calls are not needed any more, nor is a Python that waits to be
    forked."""
    if "pool" in sys.modules:
        sys.modules["pool"].end_all()
    warm.end()


def _names(path: Path, mark: str) -> bool:
    return bool(re.search(rf"\bmark\.{mark}\b", path.read_text()))


@pytest.fixture(scope="session")
def jax_compilation_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """JAX compiles a program once in this process, not once for each learner: 0.3 s instead of 4 s
    for all programs of an MLP.

    Not in processes that tests start: ranks that write one entry at the same time could read half
    of it.
    """
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    settings = {
        "jax_compilation_cache_dir": str(tmp_path_factory.mktemp("jax-compilation-cache")),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()  # JAX looks at the settings once
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
