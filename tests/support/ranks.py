"""Starts MPI ranks for tests: with a time limit, on a machine of any size; no process outlives its
test."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, NamedTuple

import pytest
import warm
from record import note

from hvdtrain.comm.launcher_variables import placement
from hvdtrain.config.schema import OPEN_SECTIONS, known_keys
from hvdtrain.core.extras import extras, implementation
from hvdtrain.errors import UserError

ROOT = Path(__file__).resolve().parents[2]

# For small machines: more ranks than cores, no pinning, waiting ranks yield the core, root may
# start ranks; without a probe for cluster networks MPI starts 1 s faster.
_SMALL_MACHINE = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "OMPI_MCA_btl": "self,sm,tcp",
    "OMP_NUM_THREADS": "1",
}
_LAUNCHED = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "MPI_LOCAL", "HOROVOD_", "SLURM_")


def mpirun_path() -> str | None:
    """Returns the mpirun next to this Python, or on the path."""
    return shutil.which("mpirun", path=str(Path(sys.executable).parent)) or shutil.which("mpirun")


# If tests skip although a compiler could have built Horovod, test_build_horovod.py fails.
needs_mpirun = pytest.mark.skipif(mpirun_path() is None, reason="no mpirun on the path")
needs_horovod = pytest.mark.skipif(
    not importlib.util.find_spec("horovod"),
    reason="Horovod is not installed: python -m hvdtrain.cli.horovod",
)


def of_this_copy(rows: Iterable[str]) -> list[str]:
    """Returns the rows of words that need no extra missing from this copy of hvdtrain."""
    return [row for row in rows if all(map(_is_of_this_copy, row.split()))]


def _is_of_this_copy(word: str) -> bool:
    from hvdtrain.features.every_feature import FEATURES

    key = word.partition("=")[0]
    if any(word in feature.extra_values for feature in FEATURES) and implementation(word) is None:
        return False
    if any(feature.key == key and not feature.is_installed for feature in FEATURES):
        return False
    return "." not in key or key in known_keys() or key.partition(".")[0] in OPEN_SECTIONS


def implemented(words: str) -> str:
    """The words without those of features that need an extra which this copy of hvdtrain lacks."""
    from hvdtrain.features.every_feature import FEATURES

    gone = {feature.key for feature in FEATURES if not feature.is_installed}
    gone |= {key for key in ("profile.steps",) if implementation(key) is None}
    return " ".join(word for word in words.split() if word.partition("=")[0] not in gone)


def jobs_of_this_copy(jobs: Mapping[str, str]) -> dict[str, str]:
    """Returns the jobs, name -> words, that need no extra missing from this copy of hvdtrain."""
    return {name: words for name, words in jobs.items() if of_this_copy([words])}


def needs_extra(name: str) -> pytest.MarkDecorator:
    """Skips a test that runs a command of an extra which this copy of hvdtrain lacks."""
    return pytest.mark.skipif(name not in extras(), reason=f"this copy lacks the extra {name}")


needs_an_extra = pytest.mark.skipif(not extras(), reason="this copy has no extras")
needs_all_files = pytest.mark.skipif(
    not (ROOT / ".git").exists(), reason="a copy without extras lacks files that pages name"
)
# of jobs that only need shards
HIGHEST_STAGE = of_this_copy(["shard.stage=3", "shard.stage=2"])[0]
needs_keras = pytest.mark.skipif(
    not importlib.util.find_spec("keras"), reason="Keras is not installed: make test-keras"
)
needs_tensorflow = pytest.mark.skipif(
    not importlib.util.find_spec("tensorflow"),
    reason="TensorFlow is not installed: make test-keras",
)
ENGINES = [
    pytest.param("mpi", marks=needs_mpirun),
    pytest.param("horovod", marks=[needs_mpirun, needs_horovod]),
]


HANG_S = 900.0  # whatever takes so long hangs: on an idle machine the longest takes a minute
# every row of the largest tables, which take an hour or more; else some of each
FULL = os.environ.get("HVDTRAIN_TEST_ROUNDS") == "full"

# one of them, or both
ONE_ENGINE = {
    engine: [each for each in ENGINES if FULL or each.values == (engine,)]
    for engine in ("mpi", "horovod")
}

in_full_rounds = pytest.mark.skipif(
    not FULL, reason="one of the dearest: HVDTRAIN_TEST_ROUNDS=full"
)


class Result(NamedTuple):
    """Exit code and output of a finished job."""

    returncode: int
    stdout: str
    stderr: str
    seconds: float


def environment(env: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a process that no launcher started, with settings for a small machine;
    `env` overrides it.

    Without PYTHONUNBUFFERED: it hides what happens to output that is not flushed.
    """
    inherited = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(_LAUNCHED) and key != "PYTHONUNBUFFERED"
    }
    path = os.pathsep.join(filter(None, (str(ROOT), inherited.get("PYTHONPATH"))))
    return {**inherited, **_SMALL_MACHINE, "PYTHONPATH": path, **(env or {})}


def mpirun(
    size: int,
    argv: Sequence[str],
    *,
    timeout_s: float = HANG_S,
    env: Mapping[str, str] | None = None,
    cwd: Path = ROOT,
    is_warm: bool = True,
) -> Result:
    """`mpirun -np SIZE python ARGV`, to its end; 124 is the exit status of a job that ran past
    timeout_s."""
    with Job(size, argv, timeout_s=timeout_s, env=env, cwd=cwd, is_warm=is_warm) as job:
        return job.wait()


def python(
    argv: Sequence[str],
    *,
    timeout_s: float = HANG_S,
    env: Mapping[str, str] | None = None,
    is_warm: bool = True,
) -> Result:
    """`python ARGV` without a launcher, to its end; `env` may have the variables of one."""
    with Job(0, argv, timeout_s=timeout_s, env=env, is_warm=is_warm) as job:
        return job.wait()


class Job:
    """A job in the background; leaving its `with` block ends every process that it started."""

    def __init__(
        self,
        size: int,
        argv: Sequence[str],
        *,
        timeout_s: float = HANG_S,
        env: Mapping[str, str] | None = None,
        cwd: Path = ROOT,
        options: Sequence[str] = (),
        is_warm: bool = False,
    ) -> None:
        """options: of mpirun; is_warm: its Pythons may begin with torch imported (warm.py)."""
        if size:
            note({"ranks": size})
        launcher = [mpirun_path() or "mpirun", *options, "-np", str(size)] if size else []
        env = environment(env)
        if is_warm:
            warm.start(environment())
        pythons = warm.command(argv, env) if is_warm else [sys.executable, *argv]
        command = ["timeout", "-k", "5", str(timeout_s), *launcher, *pythons]
        self._stdout, self._stderr = tempfile.TemporaryFile("w+"), tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed by __exit__)
        # A killed mpirun does not remove the folder of its session; another mpirun with the same
        # process number would fail to start there.
        self._sessions = tempfile.mkdtemp(prefix="hvd")
        self._start = time.monotonic()
        self._limit_s = timeout_s + 10
        self._seen = set[int]()
        self._process = subprocess.Popen(
            command,
            stdout=self._stdout,
            stderr=self._stderr,
            stdin=subprocess.DEVNULL,
            env={"TMPDIR": self._sessions, **env},
            cwd=cwd,
            # Linux gives each session a full share of the cores, even if its ranks only wait
            # (sched(7), autogroup)
            process_group=0,
        )

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *exception: object) -> None:
        self.processes()
        for pid in (self._process.pid, *self._seen):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()
        self._stdout.close()
        self._stderr.close()
        shutil.rmtree(self._sessions, ignore_errors=True)

    def processes(self) -> set[int]:
        """The job's processes that are alive: descendants of mpirun, and former descendants that
        mpirun did not end."""
        self._seen = {pid for pid in self._seen | _below(self._process.pid) if _alive(pid)}
        return self._seen

    def pids(self) -> dict[int, int]:
        """{rank: pid} of the ranks that have started."""
        ranks: dict[int, int] = {}
        pids = self.processes()
        fork_of = {client: fork for fork, client in warm.forks().items()}
        for pid in pids:
            with contextlib.suppress(OSError, UserError):
                place = placement(_environ(pid))
                if place.launcher != "none":
                    ranks[place.rank] = fork_of.get(pid, pid)
        return ranks

    def is_running(self) -> bool:
        """Whether mpirun is."""
        return self._process.poll() is None

    def errors(self) -> str:
        """What the job has printed so far to its standard error."""
        return _text(self._stderr)

    def output(self) -> str:
        """What the job has printed so far."""
        return _text(self._stdout)

    def wait(self) -> Result:
        """Waits until mpirun ends."""
        self.processes()
        code = self._process.wait(self._limit_s)
        return Result(
            code, _text(self._stdout), _text(self._stderr), time.monotonic() - self._start
        )


def _text(stream: IO[str]) -> str:
    # the job writes at this file's position: leave it alone
    return os.pread(stream.fileno(), 1 << 24, 0).decode(errors="replace")


def _below(root: int) -> set[int]:
    """The descendants of a process."""
    parents = {
        int(path.name): parent
        for path in Path("/proc").iterdir()
        if path.name.isdigit() and (parent := _parent(path))
    } | warm.forks()
    below = {root}
    while more := {pid for pid, parent in parents.items() if parent in below} - below:
        below |= more
    return below - {root}


def _parent(process: Path) -> int:
    try:
        # after the name: state, parent
        return int((process / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _environ(pid: int) -> dict[str, str]:
    pairs = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    return {key: value for key, _, value in (pair.partition("=") for pair in pairs) if value}
