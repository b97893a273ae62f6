"""The scripts of jobs/ where they cannot start a job: each says what it lacks. Batch systems are
faked at their commands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import ROOT

from hvdtrain.__main__ import main
from hvdtrain.errors import DONE

JOBS = ROOT / "jobs"
WRAPPER = JOBS / "srun-wrapper.sh"
OPEN_MPI = "echo 'Open MPI v5.0.11, package'"
PMI = "echo 'MPI plugin types are... none pmi2 pmix'"


def program(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def run(
    script: Path, *arguments: str, path: Path | None = None, folder: Path = ROOT, **variables: str
) -> subprocess.CompletedProcess[str]:
    """A script without the variables of a batch system but for these, in a folder; programs of
    `path` come first."""
    batch = ("SLURM_", "PBS_", "CONTAINER", "PYTHON", "RUN", "CUDA_VISIBLE")
    env = {
        name: value for name, value in os.environ.items() if not name.startswith(batch)
    } | variables
    env["PATH"] = f"{path or '/nowhere'}:/usr/bin:/bin"
    return subprocess.run(
        ["bash", str(script), *arguments],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )


def in_folder(folder: Path) -> Path:
    """A clone's jobs/ beside a script and a module of a user."""
    (folder / "jobs").symlink_to(JOBS)
    (folder / "train.py").touch()
    (folder / "mine").mkdir()
    (folder / "mine" / "train.py").touch()
    return folder


@pytest.mark.parametrize("name", ["slurm.sbatch", "apptainer.sbatch", "elastic.sbatch", "pbs.sh"])
def test_a_job_script_outside_of_a_batch_job_says_how_it_is_submitted(name: str) -> None:
    done = run(JOBS / name, "epochs=1")
    first, fix = done.stderr.splitlines()
    assert done.returncode == 2 and first.startswith(
        f"{name}: this is no {'PBS' if name == 'pbs.sh' else 'SLURM'} job: "
    )
    assert re.match(
        rf"  fix: .*(sbatch|qsub) .*jobs/{name} .*key=value",
        fix.replace("jobs/pbs.sh;", "jobs/pbs.sh key=value;"),
    )


@pytest.mark.parametrize("name", ["slurm.sbatch", "apptainer.sbatch", "elastic.sbatch", "pbs.sh"])
def test_a_job_script_has_one_place_for_the_site(name: str) -> None:
    """Account, partition, modules and the environment, all comments, before the first command of
    the script."""
    lines = (JOBS / name).read_text().splitlines()
    marks = [number for number, line in enumerate(lines) if line.startswith("# ---")]
    assert len(marks) == 2 and lines[marks[0]].startswith("# ---- your site")
    block = "\n".join(lines[marks[0] : marks[1]])
    assert (
        all(
            word in block
            for word in (("-A", "-q") if name == "pbs.sh" else ("--account", "--partition"))
        )
        and "#module load" in block
    )
    # a directive after a command is not read
    assert all(line.startswith("#") for line in lines[: marks[1] + 1])


SLURM = {"SLURM_JOB_ID": "7", "PMI": "none"}
STARTED = 'echo "$RUN: $*"'


@pytest.mark.parametrize(
    ("arguments", "started"),
    [
        (["epochs=1"], "-m hvdtrain run=runs/slurm-7 epochs=1"),
        (["hvdtrain", "check", "epochs=1"], "-m hvdtrain check run=runs/slurm-7 epochs=1"),
        (["python", "-m", "hvdtrain", "epochs=1"], "-m hvdtrain run=runs/slurm-7 epochs=1"),
        (["train.py", "--lr", "0 .1"], "train.py --lr 0 .1"),
        (["python3", "train.py", "a=1"], "train.py a=1"),
        (["-m", "mine.train", "a=1"], "-m mine.train a=1"),
        (["python", "-m", "mine.train"], "-m mine.train"),
        ([], "-m hvdtrain run=runs/slurm-7"),
    ],
)
def test_slurm_starts_a_job_or_a_script(tmp_path: Path, arguments: list[str], started: str) -> None:
    program(tmp_path / "srun", STARTED)
    program(tmp_path / "py", "")
    in_folder(tmp_path)
    job = {**SLURM, "SLURM_SUBMIT_DIR": str(ROOT), "PYTHON": "py"}
    done = run(JOBS / "slurm.sbatch", *arguments, path=tmp_path, folder=tmp_path, **job)
    assert (done.returncode, done.stdout) == (
        0,
        f"runs/slurm-7: --mpi=none --kill-on-bad-exit=0 --wait=30 --label {WRAPPER} py {started}\n",
    ), done
    image = tmp_path / "i.sif"
    image.touch()
    done = run(
        JOBS / "apptainer.sbatch",
        *arguments,
        path=tmp_path,
        folder=tmp_path,
        **job,
        CONTAINER=str(image),
    )
    assert done.stdout.endswith(f" {WRAPPER} python {started}\n"), done


@pytest.mark.parametrize(
    ("arguments", "started"),
    [
        ("epochs=1 --x", "run=runs/NAME epochs=1 --x"),
        ("check epochs=1", "check run=runs/NAME epochs=1"),
        ("train.py --lr 1", "train.py --lr 1"),
        ("python train.py --lr 1", "python train.py --lr 1"),
        ("-m mine.train", "-m mine.train"),
        ("", "run=runs/NAME"),
    ],
)
def test_elastic_and_pbs_start_a_job_or_a_script(
    tmp_path: Path, arguments: str, started: str
) -> None:
    python = program(tmp_path / "python", f"[ $1 = -c ] || {STARTED}")
    in_folder(tmp_path)
    job = {**SLURM, "SLURM_SUBMIT_DIR": str(ROOT), "PYTHON": python, "GROW": "0"}
    done = run(JOBS / "elastic.sbatch", *arguments.split(), path=tmp_path, folder=tmp_path, **job)
    assert done.returncode == 0 and done.stdout.startswith(
        "runs/slurm-7: -m hvdtrain launch --elastic --min 1 "
    ), done
    assert done.stdout.endswith(
        f"/jobs/slurm-hosts.sh -- {started.replace('NAME', 'slurm-7')}\n"
    ), done
    (tmp_path / "runs/pbs-7").mkdir(parents=True)
    (tmp_path / "runs/pbs-7/events.jsonl").write_text('{"kind": "end"}\n')
    pbs = {
        "PBS_O_WORKDIR": str(tmp_path),
        "PBS_JOBID": "7.server",
        "PBS_NODEFILE": "/nodes",
        "PYTHON": python,
    }
    done = run(JOBS / "pbs.sh", path=tmp_path, **pbs, ARGUMENTS=arguments)
    wanted = (
        f"runs/pbs-7: -m hvdtrain launch --hostfile /nodes -- {started.replace('NAME', 'pbs-7')}\n"
    )
    assert (done.returncode, done.stdout) == (0, wanted), done


@pytest.mark.in_turn
@pytest.mark.parametrize("name", ["slurm.sbatch", "elastic.sbatch", "pbs.sh"])
def test_words_are_checked_before_the_queue(tmp_path: Path, name: str) -> None:
    """bash jobs/NAME --dry-run: prints the command, or what is wrong with the words."""
    in_folder(tmp_path)
    variables = {"PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}

    def dry(words: str) -> tuple[int, str, str]:
        given = [] if name == "pbs.sh" else words.split()
        done = run(
            tmp_path / "jobs" / name,
            "--dry-run",
            *given,
            folder=tmp_path,
            **variables,
            ARGUMENTS=words,
        )
        return done.returncode, done.stdout, done.stderr

    code, line, _ = dry("train.py --lr 1")
    assert code == 0 and line.endswith(" train.py --lr 1 \n") and not list(tmp_path.glob("runs*"))
    assert dry("-m mine.train a=1")[0] == dry("check epochs=1")[0] == 0
    assert dry("python none.py") == (2, "", f"{name}: there is no script none.py in {tmp_path}\n")
    assert dry("-m mine.none") == (
        2,
        "",
        f"{name}: {sys.executable} in {tmp_path} finds no module mine.none\n",
    )
    assert dry("trian a=1")[2].startswith(f"{name}: there is no program trian on ")
    code, line, error = dry("epohcs=1")
    assert (
        (code, line) == (2, "")
        and "no such key: epohcs" in error
        and "did you mean epochs?" in error
    )


def test_a_time_limit_of_pbs_is_no_argument_of_a_script(tmp_path: Path) -> None:
    in_folder(tmp_path)
    job = {
        "PBS_O_WORKDIR": str(tmp_path),
        "PBS_JOBID": "7.server",
        "PBS_NODEFILE": "/dev/null",
        "MAX_TIME": "3h",
    }
    done = run(JOBS / "pbs.sh", **job, ARGUMENTS="train.py epochs=1")
    wanted = (
        "pbs.sh: MAX_TIME=3h is for key=value jobs, not for train.py; a custom loop has "
        "guard.max_time=3h\n"
    )
    assert (done.returncode, done.stderr) == (2, wanted)


def test_the_wrapper_must_be_where_the_job_was_submitted(tmp_path: Path) -> None:
    done = run(JOBS / "slurm.sbatch", SLURM_JOB_ID="7", SLURM_SUBMIT_DIR=str(tmp_path))
    wanted = (
        f"slurm.sbatch: no program {tmp_path}/jobs/srun-wrapper.sh or no jobs/job-words.sh; "
        "submit from the folder that contains jobs/\n"
    )
    assert (done.returncode, done.stderr) == (2, wanted)
    for name, job in {
        "elastic.sbatch": {"SLURM_JOB_ID": "7", "SLURM_SUBMIT_DIR": str(tmp_path)},
        "pbs.sh": {"PBS_JOBID": "7", "PBS_NODEFILE": "/dev/null", "PBS_O_WORKDIR": str(tmp_path)},
    }.items():
        done = run(JOBS / name, **job)
        assert (
            done.returncode == 2
            and done.stderr.endswith("jobs/\n")
            and f"{name}: no " in done.stderr
        )


def test_the_pbs_script_refuses_run_among_its_words(tmp_path: Path) -> None:
    """It looks in RUN for the end of the job: with run= among the words every end would look like a
    lost node."""
    job = {
        "PBS_O_WORKDIR": str(in_folder(tmp_path)),
        "PBS_JOBID": "7.server",
        "PBS_NODEFILE": "/dev/null",
    }
    done = run(JOBS / "pbs.sh", **job, ARGUMENTS="epochs=1 run=mine")
    assert (done.returncode, done.stderr) == (
        2,
        "pbs.sh: the run folder is RUN=mine, not an argument in ARGUMENTS\n",
    )


def test_the_wrapper_finds_the_pmi_of_the_mpi(tmp_path: Path) -> None:
    program(tmp_path / "srun", PMI)
    done = run(WRAPPER, "--pmi", path=tmp_path, PYTHON=program(tmp_path / "python", OPEN_MPI))
    assert (done.returncode, done.stdout, done.stderr) == (0, "pmix\n", "")
    done = run(
        WRAPPER, "--pmi", path=tmp_path, PYTHON=program(tmp_path / "python", "echo Intel MPI")
    )
    assert done.stdout == "pmi2\n"
    (tmp_path / "mpi4py.py").write_text("raise ImportError('libmpi.so.40')")
    done = run(WRAPPER, "--pmi", path=tmp_path, PYTHONPATH=str(tmp_path))
    assert done.stdout == "none\n" and re.match(
        r"srun-wrapper.sh: no MPI in .*python3\S* \(libmpi.so.40\), so --mpi=none", done.stderr
    )


@pytest.mark.parametrize(
    ("srun", "python", "arguments", "message"),
    [
        (
            None,
            OPEN_MPI,
            ["--pmi"],
            "srun --mpi=list failed on .*, which must be a node of SLURM: .*srun: ",
        ),
        (
            "echo slurm is down; exit 1",
            OPEN_MPI,
            ["--pmi"],
            "srun --mpi=list failed on .*: slurm is down",
        ),
        (PMI, None, ["--pmi"], "python does not run on .*: set PYTHON="),
        (PMI, "exit 3", ["--pmi"], "python does not run on .*: set PYTHON="),
        (
            "echo none",
            OPEN_MPI,
            ["--pmi"],
            "Open MPI v5.0.11, package needs srun --mpi=pmix, which this SLURM lacks",
        ),
        (PMI, OPEN_MPI, [], "no program to run, as in: srun --mpi=pmix"),
    ],
)
def test_the_wrapper_never_fails_silently(
    tmp_path: Path, srun: str | None, python: str | None, arguments: list[str], message: str
) -> None:
    if srun is not None:
        program(tmp_path / "srun", srun)
    if python is not None:
        program(tmp_path / "python", python)
    done = run(WRAPPER, *arguments, path=tmp_path, PYTHON=str(tmp_path / "python"))
    assert done.returncode == 2 and done.stdout == ""
    assert re.search(rf"^srun-wrapper.sh: .*{message}", done.stderr, re.MULTILINE | re.DOTALL), (
        done.stderr
    )


def test_a_command_of_the_wrapper_that_fails_is_named(tmp_path: Path) -> None:
    """taskset here, which a container may forbid; the program that it starts keeps its own exit
    code."""
    cores = len(os.sched_getaffinity(0))
    job = {
        "SLURM_LOCALID": "0",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_CPUS_ON_NODE": str(cores),
        "CUDA_VISIBLE_DEVICES": "",
    }
    program(tmp_path / "taskset", "exit 1")
    done = run(WRAPPER, "true", path=tmp_path, **job)
    if cores > 1:
        assert done.returncode == 1 and re.match(
            r"srun-wrapper.sh: failed on \S+, line \d+: taskset -cp", done.stderr
        )
    program(tmp_path / "taskset", "exit 0")
    assert run(WRAPPER, "sh", "-c", "exit 75", path=tmp_path, **job).returncode == 75
    assert run(WRAPPER, "no-such-program", path=tmp_path).stderr.rstrip().endswith("not found")


@pytest.mark.parametrize(
    ("numbers", "listed", "given"),
    [
        ((4, 5), None, ["0", "1", "0"]),  # a container with the last two of six
        ((0, 1, 2, 10), None, ["0", "1", "2"]),
        ((4,), None, ["all", "all", "all"]),
        ((), None, ["all", "all", "all"]),
        ((0, 1, 2, 3), "6,7", ["6", "7", "6"]),  # by the user, in the numbers of this node
    ],
)
def test_a_rank_gets_the_number_by_which_cuda_knows_its_gpu(
    numbers: tuple[int, ...], listed: str | None, given: list[str], tmp_path: Path
) -> None:
    """CUDA numbers the GPUs that it sees from 0; with a minor number of /dev the rank would see
    none, and train on its CPU."""
    for number in numbers:
        (tmp_path / f"nvidia{number}").touch()
    (tmp_path / "nvidiactl").touch()
    found = []
    for local_rank in range(3):
        variables = {"SLURM_LOCALID": f"{local_rank}", "SRUN_WRAPPER_DEV": f"{tmp_path}"}
        if listed:
            variables["CUDA_VISIBLE_DEVICES"] = listed
        done = run(WRAPPER, "sh", "-c", "echo ${CUDA_VISIBLE_DEVICES-all}", **variables)
        assert done.returncode == 0, done.stderr
        found.append(done.stdout.strip())
    assert found == given


def test_a_container_that_is_not_there(tmp_path: Path) -> None:
    assert "CONTAINER=x.sif, but " in run(WRAPPER, "--pmi", CONTAINER="x.sif").stderr
    program(tmp_path / "apptainer", "exit 0")
    done = run(WRAPPER, "--pmi", path=tmp_path, CONTAINER="x.sif")
    assert done.returncode == 2 and done.stderr.startswith("srun-wrapper.sh: no image x.sif on ")


def test_the_nodes_that_are_up(tmp_path: Path) -> None:
    """What sinfo printed in SLURM 22.05 for two nodes that run, a drained, a lost and an idle one;
    each line for every partition."""
    program(
        tmp_path / "sinfo",
        "printf '%s\\n' 'n1 mix' 'n1 mix' 'n2 alloc' 'n3 drng' 'n4 down*' 'n5 alloc*' 'n6 idle'",
    )
    program(tmp_path / "squeue", "echo 'n[1-6]'")
    done = run(JOBS / "slurm-hosts.sh", path=tmp_path, SLURM_JOB_ID="7", SLURM_NTASKS_PER_NODE="4")
    assert (done.returncode, done.stdout.split()) == (0, ["n1:4", "n2:4", "n6:4"])
    assert run(JOBS / "slurm-hosts.sh", path=tmp_path).returncode == 1


def in_a_program(folder: Path, code: str, *arguments: str, **modules: str) -> str:
    """What a program prints that finds these modules, whose packages are not here: only what the
    files of jobs/ call of them."""
    for name, text in modules.items():
        path = folder / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    env = {**os.environ, "PYTHONPATH": f"{folder}:{ROOT}", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done
    return done.stdout


def words_of_example(path: Path, start: str) -> list[str]:
    """The command in a file's docstring that begins with this, up to its comment."""
    (line,) = (line for line in path.read_text().splitlines() if line.startswith(start))
    return re.sub(r"\[[^]]*\]|#.*", "", line).replace("key=value ...", "epochs=1").split()


def test_the_torchx_component_starts_hvdtrain_or_a_script(tmp_path: Path) -> None:
    """torchx 0.7.0 ran it, on local_cwd: here its dist.ddp is one that prints what it gets."""
    words = words_of_example(JOBS / "torchx_component.py", "torchx run -s slurm ")
    job = words[words.index("--") + 1 :]
    code = f"""
import sys; sys.path.insert(0, {str(JOBS)!r})
from torchx_component import train
train(*sys.argv[1:], j="2x4", env={{"A": "1"}})
train("--lr", "1", script="train.py")
"""
    stand_ins = {
        "torchx____init__": "",
        "torchx__specs": "AppDef = None",
        "torchx__components____init__": "",
    }
    ddp = (
        "def ddp(*words, **options):\n    print(*words, options['script'], options['m'], "
        "options['j'], *sorted(options['env']))\n"
    )
    said = in_a_program(
        tmp_path, code, *job, **stand_ins, torchx__components__dist=ddp
    ).splitlines()
    assert said == [
        f"{' '.join(job)} None hvdtrain 2x4 A HVDTRAIN_SECRET TORCH_DISABLE_SHARE_RDZV_TCP_STORE",
        "--lr 1 train.py None 1x2 HVDTRAIN_SECRET TORCH_DISABLE_SHARE_RDZV_TCP_STORE",
    ]
    # an option of the component, as in `code`
    assert words[words.index("jobs/torchx_component.py:train") + 1 :][:2] == [
        "-j",
        "2x4",
    ]
    here = [
        word.replace("/shared/job.yaml", str(ROOT / "configs/fashion_mnist.yaml")) for word in job
    ]
    assert main([*here, "--print-config"]) == DONE


SUBMITIT = """
import types
class AutoExecutor:
    def __init__(self, **options): print(options, flush=True)
    def update_parameters(self, **options):
        print({**options, "slurm_setup": [line.partition("=")[0] for line in options["slurm_setup"]]}, flush=True)
    def submit(self, function, *arguments):
        result = function(*arguments)
        return types.SimpleNamespace(job_id=7, paths=types.SimpleNamespace(stdout="log"), results=lambda: [result])
"""  # noqa: E501


def test_the_example_of_submitit_trains(tmp_path: Path) -> None:
    """submitit 1.5.4 ran it, on this machine and on SLURM: here its executor runs the function in
    this process."""
    words = words_of_example(JOBS / "submitit_job.py", "python jobs/submitit_job.py --nodes")[2:]
    words = [word.replace("/shared/", "") for word in words] + [
        "framework=numpy",
        "model.name=linear",
    ]
    code = f"import runpy; runpy.run_path({str(JOBS / 'submitit_job.py')!r}, run_name='__main__')"
    options, parameters, *rest = in_a_program(
        tmp_path, code, *[word.replace("30", "1") for word in words], submitit=SUBMITIT
    ).splitlines()
    assert options == "{'folder': 'submitit-%j', 'cluster': None}"
    assert parameters.startswith(
        "{'nodes': 2, 'tasks_per_node': 4, 'gpus_per_node': 0, 'timeout_min': 240, "
        "'slurm_srun_args': ['--mpi=pmix', "
    )
    assert "'slurm_setup': ['export HVDTRAIN_SECRET']" in parameters
    assert rest[-2] == "job 7: log" and re.fullmatch(
        r"\{'best': 0\.\d+, 'last': 0\.\d+, 'steps': 23\}", rest[-1]
    ), rest
