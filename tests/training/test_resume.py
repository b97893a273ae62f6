"""Interrupted and resumed equals uninterrupted: to the last bit where it began, up to rounding on
other ranks, engines and frameworks."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from ranks import (
    ENGINES,
    FULL,
    HIGHEST_STAGE,
    mpirun,
    needs_horovod,
    needs_mpirun,
    of_this_copy,
    python,
)
from resume_matrix import KINDS, LINEAR, POINTS, Outcome, Stop, Work, do
from resume_runs import (
    ROOM,
    Cell,
    Run,
    check_same,
    difference,
    read_run,
    reads_the_rest,
    rows,
    rows_on,
)
from rotation import rows_of_today
from safetensors.numpy import load_file

from hvdtrain.comm.communicator import SingleProcessCommunicator
from hvdtrain.core.progress import Progress
from hvdtrain.data.sampler import indices
from hvdtrain.training.checkpoint import files

pytestmark = pytest.mark.faults
SIZES = (1, 2, 4)
FRAMES = ("torch", "numpy", "jax")
ROUNDING = 1e-12
PATH = os.pathsep.join([str(Path(__file__).parents[2]), str(Path(__file__).parents[1] / "support")])


class Setting(NamedTuple):
    """Where a job runs."""

    engine: str
    size: int
    framework: str


class Jobs:
    """Runs jobs, and keeps what they left by their run folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.runs = dict[str, Run]()

    def start(self, size: int, plan: dict[str, list[Work]]) -> None:
        """One start of MPI, or of one process, for all jobs of all engines on so many ranks."""
        plan_json, out_json = (
            self.folder / f"{name}-{len(self.runs)}.json" for name in ("plan", "out")
        )
        plan_json.write_text(json.dumps(plan))
        # 1.3 s of a job without, 0.2 s with it
        env = {
            "PYTHONPATH": PATH,
            "JAX_COMPILATION_CACHE_DIR": str(self.folder / "jax"),
            "HOROVOD_DYNAMIC_PROCESS_SETS": "1",  # rows with groups of ranks
        }
        env |= {
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        if "speed.devices=2" in plan_json.read_text():
            env["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
        argv = ["tests/support/resume_matrix.py", str(plan_json), str(out_json)]
        result = python(argv, env=env) if size == 1 else mpirun(size, argv, env=env)
        assert result.returncode == 0, result.stderr
        print(
            f"{size} ranks, {', '.join(plan)}: {sum(map(len, plan.values()))} jobs in "
            f"{result.seconds:.1f} s"
        )
        for run, outcome in json.loads(out_json.read_text()).items():
            self.runs[run] = read_run(Path(run), Outcome(*outcome))

    def run(self, *names: object) -> str:
        return str(self.folder.joinpath(*map(str, names)))

    def resumable(self, stopped: str, *names: object) -> str:
        """A new run folder with the checkpoints of another, and nothing else of it."""
        run = self.run(*names)
        shutil.copytree(Path(stopped) / "checkpoints", Path(run) / "checkpoints")
        return run


def kinds_on(engine: str) -> list[str]:
    """The kinds of state that are resumed on an engine: every second one on each, of which a
    seventh each day; all on both with HVDTRAIN_TEST_ROUNDS=full."""
    return rows_of_today(every_second(list(KINDS), engine))


def rows_of_day(engine: str) -> list[str]:
    """The examples of features that are resumed on an engine today: a seventh of every second one
    of those that several engines take, and of those that only this one takes; all that it takes
    with HVDTRAIN_TEST_ROUNDS=full."""
    others = {row for name in names_of_engines() if name != engine for row in rows_on(name)}
    chosen = {row for row in every_second(list(rows()), engine) if row in others}
    return rows_of_today(
        [row for row in rows_on(engine) if FULL or row in chosen or row not in others]
    )


def names_of_engines() -> list[str]:
    return [str(param.values[0]) for param in ENGINES]


def every_second(names: Sequence[str], engine: str) -> list[str]:
    """Returns those of an engine, so that each is on one; all with HVDTRAIN_TEST_ROUNDS=full."""
    engines = names_of_engines()
    place = engines.index(engine)
    return [name for i, name in enumerate(names) if FULL or i % len(engines) != place]


def number_of(row: str) -> str:
    """A row's part of the path of its run folders."""
    return f"row-{list(rows()).index(row)}"


class Matrix:
    """Every setting's job is stopped at every point and resumed in every setting; where both are
    the same, from every point."""

    def __init__(self, folder: Path, engines: list[str], sizes: tuple[int, ...]) -> None:
        self.jobs = Jobs(folder)
        on = {size: engines if FULL or size > 1 else [] for size in sizes}
        self.engines = {
            size: (["single"] if size == 1 else []) + on[size]
            for size in sizes
            if size == 1 or engines
        }
        self.settings = [
            Setting(engine, size, framework)
            for size in self.engines
            for engine in self.engines[size]
            for framework in (FRAMES if FULL or engine == "single" else FRAMES[:1])
        ]
        self.pairs = [
            (saved, resumed, point)
            for (i, saved), (j, resumed) in itertools.product(enumerate(self.settings), repeat=2)
            for k, point in enumerate(POINTS)
            if i == j or (i + j) % len(POINTS) == k
        ]
        for part in (self._begin, self._go_on):
            for size, names in self.engines.items():
                self.jobs.start(size, {engine: [*part(engine, size)] for engine in names})

    def _begin(self, engine: str, size: int) -> Iterator[Work]:
        """Each job to its end, and up to where it is stopped."""
        for here in self.settings:
            words = f"{LINEAR} comm.engine={engine} framework={here.framework}"
            if here[:2] == (engine, size):
                yield Work(self.jobs.run("straight", *here), words)
                for point, step in POINTS.items():
                    yield Work(
                        self.jobs.run("stopped", *here, point), words, Stop("train", step, size - 1)
                    )
        for place, (kind, words) in enumerate(KINDS.items() if size == 2 else ()):
            if kind not in kinds_on(engine):
                continue
            stop = Stop("val", 6, 1) if "evaluation" in kind else Stop("train", 7, place % 2)
            yield Work(self.jobs.run("straight", engine, kind), f"{words} comm.engine={engine}")
            yield Work(
                self.jobs.run("stopped", engine, kind), f"{words} comm.engine={engine}", stop
            )
        for row in rows_of_day(engine) if size == 2 else ():
            words = f"{rows()[row]} comm.engine={engine}"
            yield Work(self.jobs.run("straight", engine, number_of(row)), words)
            # rank 0 may be a server, which reads no samples
            stop = Stop("train", 7, 1)
            yield Work(self.jobs.run("stopped", engine, number_of(row)), words, stop)

    def _go_on(self, engine: str, size: int) -> Iterator[Work]:
        """In another process than the one that was stopped: nothing stays behind in its memory."""
        for saved, here, point in self.pairs:
            if here[:2] == (engine, size):
                run = self.jobs.resumable(
                    self.jobs.run("stopped", *saved, point), "resumed", *saved, *here, point
                )
                yield Work(run, f"{LINEAR} comm.engine={engine} framework={here.framework}")
        for kind, words in KINDS.items() if size == 2 else ():
            if kind not in kinds_on(engine):
                continue
            run = self.jobs.resumable(
                self.jobs.run("stopped", engine, kind), "resumed", engine, kind
            )
            yield Work(run, f"{words} comm.engine={engine}")
        for row in rows_of_day(engine) if size == 2 else ():
            run = self.jobs.resumable(
                self.jobs.run("stopped", engine, number_of(row)),
                "resumed",
                engine,
                number_of(row),
            )
            yield Work(run, f"{rows()[row]} comm.engine={engine}")

    def kind(self, engine: str, kind: str) -> Cell:
        return Cell(
            *(
                self.jobs.runs[self.jobs.run(part, engine, kind)]
                for part in ("straight", "stopped", "resumed")
            )
        )

    def cells(self) -> Iterator[tuple[Setting, Setting, Cell]]:
        for saved, resumed, point in self.pairs:
            runs = (
                ("straight", *saved),
                ("stopped", *saved, point),
                ("resumed", *saved, *resumed, point),
            )
            yield saved, resumed, Cell(*(self.jobs.runs[self.jobs.run(*names)] for names in runs))


# (row, column) -> [(alike in what the table does not show, difference)]
Entries = dict[tuple[str, str], list[tuple[bool, float]]]


def table(corner: str, entries: Entries) -> str:
    """Markdown: the largest difference of those that are alike / of the others."""
    names = list(dict.fromkeys(row for row, _ in entries))
    lines = [f"| {corner} | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for row in names:
        cells = []
        for column in names:
            found = [
                max(
                    (number for alike, number in entries[row, column] if alike == wanted),
                    default=None,
                )
                for wanted in (True, False)
            ]
            cells.append(
                " / ".join(
                    f"{number:.0e}" if number else "0" for number in found if number is not None
                )
            )
        lines.append(f"| {row} | {' | '.join(cells)} |")
    return "\n".join(lines)


def report(matrix: Matrix) -> str:
    """Two tables: ranks and engines, and frameworks."""
    places: Entries = defaultdict(list)
    frameworks: Entries = defaultdict(list)
    for saved, resumed, cell in matrix.cells():
        number = difference(cell)
        places[f"{saved.engine} {saved.size}", f"{resumed.engine} {resumed.size}"].append(
            (saved.framework == resumed.framework, number)
        )
        frameworks[saved.framework, resumed.framework].append((saved[:2] == resumed[:2], number))
    return f"""Largest relative difference to the uninterrupted run: {len(matrix.pairs)} resumes between {len(matrix.settings)} settings.

Communicator and ranks; in an entry: in the same framework / in another framework.

{table("saved on, resumed on", places)}

Framework; in an entry: on the same engine and ranks / on others.

{table("saved in, resumed in", frameworks)}
"""  # noqa: E501


@pytest.fixture(scope="module")
def matrix(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    """Starts four ranks only where a test was asked for that needs them, which are of full
    rounds."""
    here = [item for item in request.session.items if item.path == request.path]
    sizes = SIZES if FULL and any(item.get_closest_marker("ranks4") for item in here) else SIZES[:2]
    engines = [
        str(engine.values[0])
        for engine in ENGINES
        if not any(mark.args[0] for mark in engine.marks)
    ]  # type: ignore[union-attr]
    return Matrix(tmp_path_factory.mktemp("resume"), engines, sizes)


@pytest.mark.every_day
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, *[pytest.param(4, marks=pytest.mark.ranks4)] * FULL])
def test_interrupted_and_resumed_equals_uninterrupted(matrix: Matrix, ranks: int) -> None:
    """`ranks` are the most of the two settings."""
    cells = [found for found in matrix.cells() if max(found[0].size, found[1].size) == ranks]
    here, less = (
        len([s for s in matrix.settings if s.size in sizes]) for sizes in ([ranks], range(ranks))
    )
    # from all three points where both settings are the same
    assert len(cells) == (here + less) ** 2 - less**2 + 2 * here
    for saved, resumed, cell in cells:
        print(*saved, "->", *resumed)
        if saved == resumed:
            check_same(cell)
        assert difference(cell) <= ROUNDING
        assert reads_the_rest(cell)


@pytest.mark.every_day
@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "kind"),
    [
        pytest.param(engine.values[0], kind, marks=engine.marks)
        for engine in ENGINES
        for kind in kinds_on(str(engine.values[0]))
    ],
)
def test_every_kind_of_state_resumes_to_the_last_bit(
    matrix: Matrix, engine: str, kind: str
) -> None:
    cell = matrix.kind(engine, kind)
    check_same(cell)
    assert cell.stopped.train_state["progress"]["step"] == (6 if "evaluation" in kind else 9)
    assert (cell.stopped.train_state["noise"][1] != 0) == (kind == "noise scale")


@pytest.mark.every_day
@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_every_example_of_a_feature_resumes_to_the_last_bit(matrix: Matrix, engine: str) -> None:
    for row in rows_of_day(engine):
        print(row)
        cell = matrix.kind(engine, number_of(row))
        check_same(cell)
        assert cell.stopped.train_state["progress"]["step"] == 8
        assert cell.straight.train_state["progress"]["step"] == 12


@pytest.mark.every_day
@pytest.mark.slow
def test_the_table(matrix: Matrix) -> None:
    text = report(matrix)
    print(text)
    if out := os.environ.get("HVDTRAIN_RESUME_OUT"):
        Path(out).write_text(text)


IN_PARTS = "parallel.tensor=2"
IN_STAGES = "parallel.pipeline=2 parallel.micro_batches=5"


@pytest.mark.slow
@needs_mpirun
@needs_horovod
@pytest.mark.parametrize(
    ("framework", "starts"),
    [
        pytest.param(
            "torch",
            [
                *((4, "mpi", words) for words in of_this_copy([f"shard.stage=3 {IN_PARTS}"])),
                (3, "torchdist", " ".join(["shard.stage=0", *of_this_copy(["parallel.tensor=1"])])),
                *((2, "mpi", words) for words in of_this_copy([IN_STAGES])),
                (1, "single", " ".join(["shard.stage=1", *of_this_copy(["parallel.pipeline=1"])])),
                *[
                    (2, "horovod", "shard.stage=2"),
                    (2, "mpi", " ".join(["shard.stage=0", *of_this_copy([IN_PARTS])])),
                ]
                * FULL,
            ],
            marks=pytest.mark.ranks4,
        ),
        (
            "jax",
            [
                (3, "mpi", HIGHEST_STAGE),
                (2, "mpi", "shard.stage=2"),
                *[(2, "horovod", f"shard.stage={n}") for n in (3, 1)] * FULL,
            ],
        ),
    ],
)
def test_a_job_in_parts_goes_on_with_other_parts_ranks_and_engine(
    framework: str, starts: list[tuple[int, str, str]], tmp_path: Path
) -> None:
    words = [
        *[
            "data.name=digits",
            "model.name=mlp",
            "optim.name=sgd",
            "optim.base_lr=0.05",
            "optim.clip_norm=1",
            "batch.size=31",
        ]
    ]
    words += [
        *[
            "speed.precision=fp64",
            "log.every_s=60",
            "comm.bucket_mb=0.01",
            "recipe.schedule=constant",
            "recipe.warmup=0",
        ]
    ]
    words += [f"framework={framework}"]
    one = tmp_path / "one"
    chain = tmp_path / "chain"
    assert (
        python(
            ["-m", "hvdtrain", f"run={one}", *words, f"stop.steps={30 * len(starts)}"]
        ).returncode
        == 0
    )
    for place, (size, engine, parts) in enumerate(starts, start=1):
        place_words = [f"comm.engine={engine}", *parts.split(), f"stop.steps={30 * place}"]
        place_words += [f"resume={chain}"] if place > 1 else [f"run={chain}", *words]
        assert mpirun(size, ["-m", "hvdtrain", *place_words]).returncode == 0
    for file in files.ARRAYS:
        straight, resumed = (load_file(files.finished(run)[-1] / file) for run in (one, chain))
        assert straight.keys() == resumed.keys()
        for name, array in straight.items():
            np.testing.assert_allclose(resumed[name], array, rtol=0, atol=1e-14, err_msg=name)


def moved(stopped: Path, run: Path, **changes: Any) -> Path:
    """The newest checkpoint in a new run folder, with other arrays or another state of training."""
    newest = files.finished(stopped)[-1]
    found = files.read_numbers(newest)
    arrays = changes.pop("arrays", files.read_arrays(newest, ROOM))
    run.mkdir(exist_ok=True)
    files.write(run, replace(found.train_state, **changes), arrays, found.identity)
    return run


def test_the_comparison_notices_lost_optimizer_state_and_samples_that_are_read_twice(
    tmp_path: Path,
) -> None:
    def run(folder: Path, stop: Stop | None = None) -> Run:
        return read_run(
            folder,
            do(Work(str(folder), f"{LINEAR} framework=numpy", stop), SingleProcessCommunicator()),
        )

    straight = run(tmp_path / "straight")
    stopped = run(tmp_path / "stopped", Stop("train", 7, 0))
    no_state = {name: array * (not name.startswith("s.")) for name, array in stopped.arrays.items()}
    cases = {
        "whole": {},
        "optimizer state": {"arrays": no_state},
        "samples": {"progress": Progress(157, 471, 8, 278)},
    }
    cells = {
        name: Cell(straight, stopped, run(moved(tmp_path / "stopped", tmp_path / name, **changes)))
        for name, changes in cases.items()
    }
    check_same(cells["whole"])
    assert difference(cells["optimizer state"]) > 1e-3
    assert difference(cells["samples"]) > 1e-3
    assert {name: reads_the_rest(cell) for name, cell in cells.items()} == {
        "whole": True,
        "optimizer state": True,
        "samples": False,
    }


@pytest.mark.clock
def test_the_first_step_comes_as_soon_after_a_million_steps(tmp_path: Path) -> None:
    """Nothing is replayed: neither samples, nor batches, nor schedules."""
    words = (
        f"{LINEAR} framework=numpy epochs=1000000 recipe.growth=none recipe.grow_at=[] "
        "recipe.grow_to=[] max_steps="
    )
    do(Work(str(tmp_path / "short"), f"{words}4"), SingleProcessCommunicator())
    seconds: dict[int, list[float]] = {4: [], 10**6: []}
    for turn, step in itertools.product(range(5), seconds):
        progress = Progress(157, 157 * 10**6, step, 31 * step)
        run = moved(
            tmp_path / "short",
            tmp_path / f"{step}-{turn}",
            progress=progress,
            epoch=progress.epoch,
            evaluated=step - 1,
        )
        outcome = do(Work(str(run), f"{words}{step + 3}"), SingleProcessCommunicator())
        assert outcome.rows == [indices(31 * step, 93, 0, 1, 157, seed=1).tolist()]
        seconds[step].append(outcome.start_s)
    early, late = (statistics.median(times) for times in seconds.values())
    print(
        f"to the first sample: {1e3 * early:.1f} ms from step 4, {1e3 * late:.1f} ms from step "
        "1,000,000 (medians of 5)"
    )
    assert late < 10 * early + 0.05
