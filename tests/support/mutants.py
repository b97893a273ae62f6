"""Wrong changes of the product; a fast test beside the code has to find each of them.

    make mutants                        all of them; the exit status is 1 where one survives
    make mutants ARGS="zero.owner"      some, by name
    make mutants ARGS=--list            what there is

Each change is made in a copy of the tree in a temporary folder, where the tests of its row then
run. The tree itself does not change.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
COPIED = (
    "hvdtrain",
    "tests",
    "configs",
    "docs",
    "setup.cfg",
    "pyproject.toml",
    "README.md",
    "CHANGELOG.md",
)
MARKS = "not slow and not faults and not cluster and not gpu and not clock"
LIMIT_S = 600  # of one run of pytest: a change may also make ranks wait for ever
# exit statuses of pytest; others are of a run that could not begin
PASSED = 0
FAILED = 1


class Mutant(NamedTuple):
    """A wrong change of one file."""

    name: str
    file: str
    before: str  # which the file has once
    after: str
    tests: tuple[str, ...]  # files or node ids next to the code; one of their tests has to fail

    def apply(self, root: Path) -> None:
        path = root / self.file
        path.write_text(path.read_text().replace(self.before, self.after))


class Verdict(NamedTuple):
    """What pytest said."""

    status: int | None  # None: it did not end in time
    output: str
    seconds: float

    @property
    def first_failed(self) -> str:
        found = re.search(r"^(?:FAILED|ERROR) (\S+)", self.output, re.MULTILINE)
        return found[1] if found else f"no end within {LIMIT_S} s" if self.status is None else ""


CHECKPOINTS = "hvdtrain/training/checkpoint/files.py"
LEARNER = "hvdtrain/frameworks/torch/learner.py"
STEP = "hvdtrain/frameworks/torch/step.py"
PARALLEL = "hvdtrain/frameworks/torch/parallel"
SAMPLER = "hvdtrain/data/sampler.py"
LOOP = "hvdtrain/training/loop.py"

MUTANTS = (
    Mutant(
        "dropout.stream",
        "hvdtrain/frameworks/torch/device.py",
        "return readers.rank + readers.size * (mesh.pipe.rank + mesh.pipe.size * part)",
        "return 0",
        ("tests/frameworks/test_learners.py",),
    ),
    Mutant(
        "evaluation.batches",
        SAMPLER,
        "firsts = range(start, start + -(-samples // size), batch)",
        "firsts = range(start, end, batch)",
        ("tests/data/test_sampler.py",),
    ),
    Mutant(
        "checkpoint.sync_of_the_new_folder",
        CHECKPOINTS,
        "                new.sync()\n",
        "",
        ("tests/training/test_checkpoint.py",),
    ),
    Mutant(
        "checkpoint.sync_behind_the_rename",
        CHECKPOINTS,
        "        checkpoints.sync()\n",
        "",
        ("tests/training/test_checkpoint.py",),
    ),
    Mutant(
        "loop.confirm",
        LOOP,
        "    if job.memory_copy:\n        job.memory_copy.confirm()\n    return total",
        "    return total",
        ("tests/training/test_loop.py",),
    ),
    Mutant(
        "prefetch.servers",
        "hvdtrain/training/input.py",
        "if config.is_asynchronous:",
        "if False:",
        ("tests/training/test_prefetch.py",),
    ),
    Mutant(
        "lines.pace",
        "hvdtrain/events/writers.py",
        "        return has_line\n",
        "        return True\n",
        ("tests/events/test_terminal.py::test_lines_of_steps_wait_for_their_time_and_no_others",),
    ),
    Mutant(
        "buckets.wait",
        f"{PARALLEL}/buckets.py",
        "        flat = self._handle.wait()\n",
        "        flat = self._flat\n",
        ("tests/frameworks/test_buckets.py",),
    ),
    Mutant(
        "zero.owner",
        f"{PARALLEL}/zero_1_and_2.py",
        "self._own = part_of(len(self._weights), self._mesh.shard.rank, self._mesh.shard.size)",
        "self._own = part_of(len(self._weights), self._mesh.shard.size - 1 - "
        "self._mesh.shard.rank, self._mesh.shard.size)",
        ("tests/frameworks/test_ranks_in_threads.py",),
    ),
    Mutant(
        "local_sgd.average",
        f"{PARALLEL}/local_sgd.py",
        "flat = torch.cat([t.reshape(-1) for t in bucket]).to(device) / self._communicator.size",
        "flat = torch.cat([t.reshape(-1) for t in bucket]).to(device)",
        ("tests/frameworks/test_ranks_in_threads.py",),
    ),
    Mutant(
        "fsdp.gradient_of_the_step_before",
        "hvdtrain/extras/fully_sharded/torch/strategy.py",
        "            p.grad = None\n",
        "",
        ("tests/extras/test_fully_sharded.py",),
    ),
    Mutant(
        "servers.bound",
        "hvdtrain/extras/servers/turns.py",
        "for i, read in enumerate(others))",
        "for i, read in enumerate(others[1:]))",
        ("tests/extras/test_servers.py",),
    ),
    Mutant(
        "pipeline.held",
        "hvdtrain/extras/pipeline/schedule.py",
        'if schedule == "gpipe" or not backward else ranks - rank\n',
        'if schedule == "gpipe" or not backward else ranks\n',
        ("tests/extras/test_pipeline.py",),
    ),
    Mutant(
        "dense.scale",
        "hvdtrain/extras/dense/hybrid.py",
        "turn.x.grad * (len(turn.x) / batch)",
        "turn.x.grad",
        ("tests/extras/test_dense.py",),
    ),
    Mutant(
        "clip.norm_of_a_part",
        "hvdtrain/optim/clip.py",
        "norm = xp.sqrt(total(sum((g * g).sum() for g in clipped)))",
        "norm = xp.sqrt(sum((g * g).sum() for g in clipped))",
        ("tests/frameworks/test_ranks_in_threads.py",),
    ),
    Mutant(
        "step.unscale",
        STEP,
        "        self._scale.unscale_(self._parameters)\n",
        "",
        ("tests/frameworks/test_precision.py",),
    ),
    Mutant(
        "step.noise_of_each_rank",
        LEARNER,
        "bad, hyper, seed, lambda bad",
        "bad, hyper, seed + self.data.rank, lambda bad",
        ("tests/frameworks/test_ranks_in_threads.py",),
    ),
    Mutant(
        "step.divisor",
        STEP,
        "        return losses.total / divisor * ",
        "        return losses.total * ",
        ("tests/frameworks/test_learners.py",),
    ),
    Mutant(
        "step.nonfinite_of_one_rank",
        STEP,
        "        return self._strategy.total(bad.double()) > 0\n",
        "        return bad\n",
        ("tests/frameworks/test_ranks_in_threads.py",),
    ),
    Mutant(
        "step.buffers_of_a_skipped_step",
        STEP,
        "            self._restore()\n",
        "            pass\n",
        ("tests/frameworks/test_nonfinite.py",),
    ),
    Mutant(
        "bucket.fill",
        f"{PARALLEL}/buckets.py",
        "            if p not in self._taken:\n                self.take(p)\n",
        "            pass\n",
        ("tests/frameworks/test_buckets.py",),
    ),
    Mutant(
        "zero.sum_of_passes",
        f"{PARALLEL}/zero_1_and_2.py",
        "self._sum.copy_(part) if self._sums == 0 else self._sum.add_(part.to(self._sum.device))",
        "self._sum.copy_(part)",
        ("tests/frameworks/test_ranks_in_threads.py",),
    ),
    Mutant(
        "horovod.divisor",
        f"{PARALLEL}/by_library.py",
        "named_parameters=named, op=hvd.Sum)",
        "named_parameters=named, op=hvd.Average)",
        (
            "tests/training/test_invariance.py::test_other_ways_to_have_a_model_on_ranks_have_the_curve_of_one",
        ),
    ),
    Mutant(
        "tensor.gradient_of_what_all_have",
        "hvdtrain/extras/tensor/collectives.py",
        '        return ctx.link.sum(dy, "backward"), None\n',
        "        return dy, None\n",
        (
            "tests/training/test_invariance.py::test_other_ways_to_have_a_model_on_ranks_have_the_curve_of_one",
        ),
    ),
    Mutant(
        "pipeline.tied",
        "hvdtrain/extras/pipeline/executor.py",
        "p.grad = torch.stack([copies[rank] for rank in ranks]).sum(0)",
        "p.grad = torch.stack([copies[rank] for rank in ranks]).mean(0)",
        (
            "tests/training/test_invariance.py::test_other_ways_to_have_a_model_on_ranks_have_the_curve_of_one",
        ),
    ),
    Mutant(
        "servers.gradients_of_the_others",
        "hvdtrain/extras/servers/server.py",
        "            gradient += other.received\n",
        "            pass\n",
        (
            "tests/extras/test_servers_keys.py::test_synchronous_servers_have_the_curve_of_one_process",
        ),
    ),
    Mutant(
        "checkpoint.checksum",
        CHECKPOINTS,
        "elif checksums.get(name) != _checksum(file, on_piece):",
        "elif name not in checksums:",
        ("tests/training/test_checkpoint.py",),
    ),
    Mutant(
        "sampler.resumed_position",
        SAMPLER,
        "epoch, first = divmod(start, dataset)",
        "epoch, first = start // dataset, 0",
        ("tests/data/test_sampler.py",),
    ),
    Mutant(
        "sync_point.flags_of_one_rank",
        LOOP,
        '    return add_up(job, sums, "train.sums")  #',
        '    return add_up(job, sums, "train.sums") | job.health.flags(p.step)  #',
        ("tests/training/test_loop.py",),
    ),
)


def of_this_copy(mutants: Iterable[Mutant] = MUTANTS, root: Path = ROOT) -> list[Mutant]:
    """Returns the mutants of a table that change no extra, or an extra that this copy has."""
    return [
        mutant
        for mutant in mutants
        if not mutant.file.startswith("hvdtrain/extras/")
        or root.joinpath(*Path(mutant.file).parts[:3]).is_dir()
    ]


def troubles(mutants: Iterable[Mutant] = MUTANTS, root: Path = ROOT) -> list[str]:
    """What a table says that the tree does not have: a text that a file has not exactly once, a
    test that is not there."""
    found = []
    for mutant in mutants:
        times = (
            (root / mutant.file).read_text().count(mutant.before)
            if (root / mutant.file).is_file()
            else 0
        )
        if times != 1:
            found.append(
                f"{mutant.name}: {mutant.file} has the text to change {times} times, not once: "
                f"{mutant.before.strip()!r}"
            )
        for test in mutant.tests:
            file, _, name = test.partition("::")
            if not (root / file).is_file() or (
                name and f"def {name.partition('[')[0]}(" not in (root / file).read_text()
            ):
                found.append(f"{mutant.name}: there is no {test}")
    return found


def copy_tree(folder: Path) -> None:
    """Copies what the tests of the table need, including compiled modules: Python uses them if time
    and size of the source are unchanged."""
    for name in COPIED:
        if (ROOT / name).is_dir():
            # another Python writes one
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("*.pyc.*"))
        else:
            shutil.copy2(ROOT / name, folder / name)


def environment(folder: Path) -> dict[str, str]:
    """Returns the environment for a Python that imports hvdtrain from the folder, before this
    checkout's editable installation."""
    return {**os.environ, "PYTHONPATH": str(folder)}


def check_import(folder: Path) -> None:
    """Raises SystemExit if Python would test the tree itself."""
    code = "import hvdtrain; print(hvdtrain.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd="/",
        env=environment(folder),
        capture_output=True,
        text=True,
        check=True,
    )
    if not done.stdout.startswith(f"{folder}{os.sep}"):
        raise SystemExit(
            f"mutants: hvdtrain is imported from {done.stdout.strip()}, not from the copy in "
            f"{folder}"
        )


def run_tests(tests: Sequence[str], mutant: Mutant | None = None) -> Verdict:
    """The tests in a copy of the tree that has the change."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as temporary:
        folder = Path(temporary).resolve()
        copy_tree(folder)
        check_import(folder)
        if mutant:
            mutant.apply(folder)
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-x",
            "-q",
            "-p",
            "no:cacheprovider",
            "-m",
            MARKS,
            *tests,
        ]
        return _run(command, folder)


def _run(command: Sequence[str], folder: Path) -> Verdict:
    began_s = time.perf_counter()
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment(folder),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        output = process.communicate(timeout=LIMIT_S)[0]
        status = process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        output = process.communicate()[0]
        status = None
    return Verdict(status, output, time.perf_counter() - began_s)


def check_unchanged(mutants: Sequence[Mutant]) -> None:
    """Raises SystemExit if the tests fail without a change, because their results would then mean
    nothing."""
    tests = list(dict.fromkeys(test for mutant in mutants for test in mutant.tests))
    run = run_tests(tests)
    if run.status != PASSED:
        raise SystemExit(
            f"{run.output}\nmutants: the tests fail without a change: "
            f"{run.first_failed or f'exit status {run.status}'}"
        )
    print(f"unchanged: the tests pass in {run.seconds:.0f} s", flush=True)


def try_out(mutant: Mutant) -> bool:
    """Prints the test that finds the mutant; returns whether there is one. Raises SystemExit if
    pytest cannot start."""
    run = run_tests(mutant.tests, mutant)
    if run.status not in (PASSED, FAILED, None):
        raise SystemExit(
            f"{run.output}\nmutants: {mutant.name}: pytest ends with exit status {run.status}: "
            "the change is no Python"
        )
    is_found = run.status != PASSED
    print(
        f"{mutant.name}: {f'found by {run.first_failed}' if is_found else 'SURVIVED'}, "
        f"{run.seconds:.1f} s",
        flush=True,
    )
    return is_found


def chosen(names: Sequence[str]) -> list[Mutant]:
    by_name = {mutant.name: mutant for mutant in MUTANTS}
    if unknown := [name for name in names if name not in by_name]:
        raise SystemExit(f"mutants: unknown: {', '.join(unknown)}; there are {', '.join(by_name)}")
    return [by_name[name] for name in names] or of_this_copy()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", action="store_true", help="print the table")
    parser.add_argument("names", nargs="*", metavar="NAME")
    options = parser.parse_args()
    mutants = chosen(options.names)
    if options.list:
        print("\n".join(f"{mutant.name:36} {mutant.file}" for mutant in mutants))
        return 0
    if found := troubles(mutants):
        raise SystemExit("\n".join(found))
    check_unchanged(mutants)
    survived = []
    for number, mutant in enumerate(mutants, start=1):
        print(f"{number:2} of {len(mutants)}  ", end="", flush=True)
        survived += [] if try_out(mutant) else [mutant.name]
    print(
        f"{len(mutants) - len(survived)} of {len(mutants)} found"
        + f"; survived: {', '.join(survived)}" * bool(survived)
    )
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
