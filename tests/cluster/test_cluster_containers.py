"""Containers: built without a registry; the tests run inside; with both ways to start ranks a job
ends as without a container."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster_containers import BUILT_S, apptainer, debian_13, image, must, run, sif
from cluster_hosts import Hosts
from cluster_slurm import Slurm
from faults import Tree, events, outcome
from ranks import ENGINES, FULL, in_full_rounds, mpirun, mpirun_path

# the first one builds the images
pytestmark = [
    pytest.mark.cluster,
    pytest.mark.in_turn(together=True),
    pytest.mark.timeout(BUILT_S),
]

# Everything that two ranks in two containers need of each other: the wire, shared memory and its
# processes, PMIx's files, the user.
TOGETHER = ["--network=host", "--ipc=host", "--pid=host", "--volume=/tmp:/tmp", "--user=0:0"]
SETTINGS = [f"--env={name}" for name in ("OMPI_*", "PMIX_*", "PRTE_*", "OMP_NUM_THREADS")]
WORDS = [
    "-m",
    "hvdtrain",
    "epochs=2",
    "model.widths=[4,4,8,8]",
    "batch.size=33",
    "optim.base_lr=0.03",
]
# PMIx through the border with plain MPI, and the image's own mpirun with the image's own Horovod;
# the other two in full rounds.
STARTS = [
    pytest.param("host", *ENGINES[0].values, marks=ENGINES[0].marks),
    pytest.param("inside", *ENGINES[1].values, marks=ENGINES[1].marks),
]
if FULL:
    STARTS += [
        pytest.param(launcher, *of.values, marks=of.marks)
        for launcher, of in zip(("inside", "host"), ENGINES, strict=True)
    ]


def job(engine: str, folder: Path) -> list[str]:
    folder.chmod(0o777)  # for the image's own user
    return [*WORDS, f"comm.engine={engine}", f"run={folder / 'run'}"]


@pytest.fixture(scope="module")
def outside(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tree]:
    """What the job of each engine comes to without a container."""
    outcomes = {}
    for communicator in ("mpi", "horovod"):
        folder = tmp_path_factory.mktemp(communicator)
        result = mpirun(2, job(communicator, folder))
        assert result.returncode == 0, result
        outcomes[communicator] = outcome(folder / "run")
    return outcomes


@pytest.mark.skipif(
    not FULL,
    reason="builds an image with all that tests need, for minutes: HVDTRAIN_TEST_ROUNDS=full",
)
def test_the_tests_run_inside_as_an_ordinary_user() -> None:
    chosen = (
        "abort or killed or not_installed or traceback or job_says or short_message or "
        "micro_batches"
    )
    tests = ["tests/comm/test_communicators.py", "tests/training/test_train.py", "-k", chosen]
    inside = (
        f"id -u && hvdtrain --version && python -m pytest -q {tests[0]} {tests[1]} -k '{chosen}'"
    )
    ran = run(["podman", "run", "--rm", image("test"), "sh", "-c", inside])
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr
    assert ran.stdout.startswith("10001\nhvdtrain "), ran.stdout
    assert int(re.findall(r"(\d+) passed", ran.stdout)[0]) >= 25, ran.stdout[-500:]
    assert "skipped" not in ran.stdout, "Horovod and mpirun are there"


def test_the_image_is_small_and_carries_nothing_of_the_machine_that_built_it() -> None:
    name = image("runtime")
    size = int(must(["podman", "image", "inspect", "--format", "{{.Size}}", name]))
    assert size < 1.4e9, f"{size / 1e6:.0f} MB"
    assert "hvdtrain [--config FILE]" in must(["podman", "run", "--rm", name])
    look = (
        "for name in g++ cmake make; do command -v $name; done; cat /etc/pip.conf; ls ~/.cache "
        "/root; hvdtrain --version; touch file"
    )
    said = run(["podman", "run", "--rm", "--user", "12345", name, "sh", "-c", look])
    assert re.fullmatch(r"hvdtrain \S+\n", said.stdout), said
    assert "touch" not in said.stderr, said


@pytest.mark.parametrize(("launcher", "engine"), STARTS)
def test_podman(tmp_path: Path, outside: dict[str, Tree], engine: str, launcher: str) -> None:
    podman = ["podman", "run", "--rm", *SETTINGS]
    ranks = [str(mpirun_path()), "-np", "2"]
    if launcher == "host":
        command = [*ranks, *podman, *TOGETHER, image("runtime"), "python"]
    else:
        command = [
            *podman,
            f"--volume={tmp_path}:{tmp_path}",
            image("runtime"),
            "mpirun",
            "-np",
            "2",
            "python",
        ]
    as_outside([*command, *job(engine, tmp_path)], tmp_path, outside[engine])


@pytest.mark.parametrize(("launcher", "engine"), STARTS)
def test_apptainer(tmp_path: Path, outside: dict[str, Tree], engine: str, launcher: str) -> None:
    container = [str(apptainer()), "exec", str(sif("runtime"))]
    ranks = [str(mpirun_path()), "-np", "2"]
    command = (
        [*ranks, *container, "python"]
        if launcher == "host"
        else [*container, "mpirun", "-np", "2", "python"]
    )
    as_outside([*command, *job(engine, tmp_path)], tmp_path, outside[engine])


def as_outside(command: list[str], folder: Path, expected: Tree) -> None:
    """One job of two ranks, not two of one, with the result of the job outside, to the last bit."""
    ran = run(command, cwd=folder)
    assert ran.returncode == 0, ran
    assert re.findall(r"^ranks   \d+", ran.stdout, re.M) == ["ranks   2"], ran
    assert outcome(folder / "run") == expected


def test_the_sif_runs_the_code_that_is_in_it(tmp_path: Path) -> None:
    code = "import hvdtrain, torch; print(hvdtrain.__file__, torch.__file__)"
    said = run([apptainer(), "exec", sif("runtime"), "python", "-c", code], cwd=tmp_path)
    assert [word.startswith("/opt/hvdtrain/lib/python3") for word in said.stdout.split()] == [
        True,
        True,
    ], said
    said = run([apptainer(), "run", sif("runtime"), "--version"], cwd=tmp_path)
    assert said.stdout.startswith("hvdtrain "), said
    said = run([apptainer(), "run-help", sif("runtime")], cwd=tmp_path)
    assert "apptainer exec hvdtrain.sif" in said.stdout, said


@pytest.mark.slow
@pytest.mark.timeout(
    BUILT_S
)  # the first one fetches 3 GB: PyPI has only CUDA builds of torch for this Python
def test_make_train_on_debian_13_with_its_python_3_13() -> None:
    arguments = "epochs=2 model.widths=[4,4,8,8] run=/tmp/run"
    ran = debian_13(
        ["sh", "-c", f"rm -rf /tmp/run; make -C /src train ARGS='{arguments}'"], timeout_s=BUILT_S
    )
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    assert re.findall(r"^ranks   2 .* engine horovod", ran.stdout, re.M), ran.stdout[-3000:]
    look = (
        "cd / && python --version && python -c 'import torchvision' && hvdtrain report /tmp/run "
        "&& ls /tmp/run/report.html"
    )
    ran = debian_13(["sh", "-c", f"PATH=/src/.venv/bin:$PATH; {look}"])
    assert ran.returncode == 0, ran
    assert ran.stdout.startswith("Python 3.13.") and ran.stdout.endswith(
        "/tmp/run/report.html\n"
    ), ran


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    with Hosts(2) as hosts, Slurm(hosts) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def four_outside(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    folder = tmp_path_factory.mktemp("four")
    result = mpirun(4, job("mpi", folder))
    assert result.returncode == 0, result
    return losses(folder)


def losses(folder: Path) -> list[float]:
    return [
        event[key]
        for event in events(folder / "run")
        if event["kind"] == "epoch"
        for key in ("train_loss", "val_loss")
    ]


@in_full_rounds  # jobs/apptainer.sbatch, below, does the same
def test_srun_starts_one_job_of_containers(
    slurm: Slurm, four_outside: list[float], tmp_path: Path
) -> None:
    container = [str(apptainer()), "exec", str(sif("runtime")), "python"]
    srun = [
        "srun",
        "--mpi=pmix",
        "--kill-on-bad-exit=1",
        "-N2",
        "-n4",
        "--ntasks-per-node=2",
        f"--chdir={tmp_path}",
    ]
    said = slurm.must(*srun, *container, *job("mpi", tmp_path), env={"PYTHONPATH": ""})
    assert re.findall(r"^ranks   4 \(n1 x 2, n2 x 2\)", said, re.M), said
    assert losses(tmp_path) == pytest.approx(four_outside, rel=1e-4)  # another order of the sums


def test_the_batch_script_is_that_of_slurm_in_containers(
    slurm: Slurm, four_outside: list[float], tmp_path: Path
) -> None:
    path = f"{apptainer().parent}{os.pathsep}{os.environ['PATH']}"
    env = {
        "PYTHONPATH": "",
        "PATH": path,
        "CONTAINER": str(sif("runtime")),
        "RUN": str(tmp_path / "run"),
        "PYTHON": "/no/such/python",
    }
    submit = [
        "sbatch",
        "--wait",
        "-N2",
        "--ntasks-per-node=2",
        "-t4",
        f"--chdir={tmp_path}",
        f"--output={tmp_path / 'log'}",
    ]
    ran = slurm.run(*submit, "jobs/apptainer.sbatch", *job("mpi", tmp_path)[2:-1], env=env)
    log = (tmp_path / "log").read_text() if (tmp_path / "log").exists() else ""
    print(log)  # whole: a rank that crashes leaves its stack there
    assert ran.returncode == 0, ran
    assert re.findall(r"ranks   4 \(n1 x 2, n2 x 2\)", log), log
    assert losses(tmp_path) == pytest.approx(four_outside, rel=1e-4)


def test_the_batch_script_without_an_image() -> None:
    script = "SLURM_JOB_ID=1 SLURM_SUBMIT_DIR=/no/folder bash jobs/apptainer.sbatch"
    said = run(["env", "-u", "CONTAINER", "sh", "-c", script])
    assert said.returncode == 2, said
    assert said.stderr.startswith("no image: /no/folder/hvdtrain.sif on "), said
    assert "make it as jobs/hvdtrain.def says, or set CONTAINER=" in said.stderr
