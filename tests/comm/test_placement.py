"""The placement by one launcher's complete set of variables, or an error that names what is
wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hvdtrain.__main__ import main
from hvdtrain.comm.communicator import SingleProcessCommunicator, connect
from hvdtrain.comm.launcher_variables import (
    LAUNCHERS,
    NO_LAUNCHER,
    EngineLibrary,
    Placement,
    check_library,
    check_size,
    library_name,
    placement,
)
from hvdtrain.errors import DONE, USER, UserError

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
HOROVODRUN = {
    "HOROVOD_RANK": "3",
    "HOROVOD_SIZE": "8",
    "HOROVOD_LOCAL_RANK": "1",
    "HOROVOD_LOCAL_SIZE": "2",
    "HOROVOD_CROSS_RANK": "1",
}
TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "n1",
}
HYDRA = {
    "PMI_RANK": "3",
    "PMI_SIZE": "8",
    "MPI_LOCALRANKID": "1",
    "MPI_LOCALNRANKS": "2",
    "PMI_FD": "9",
}
FLUX = {
    "FLUX_TASK_RANK": "3",
    "FLUX_JOB_SIZE": "8",
    "FLUX_TASK_LOCAL_ID": "1",
    "FLUX_JOB_NNODES": "4",
    "PMI_RANK": "3",
    "PMI_SIZE": "8",
}
PALS = {
    "PALS_RANKID": "3",
    "PALS_LOCAL_RANKID": "1",
    "PALS_LOCAL_SIZE": "2",
    "PALS_NODEID": "1",
    "PMI_RANK": "3",
    "PMI_SIZE": "8",
}
JSRUN = {
    "JSM_NAMESPACE_RANK": "3",
    "JSM_NAMESPACE_SIZE": "8",
    "JSM_NAMESPACE_LOCAL_RANK": "1",
    "JSM_NAMESPACE_LOCAL_SIZE": "2",
    "PMIX_RANK": "3",
}
MVAPICH2 = {
    "MV2_COMM_WORLD_RANK": "3",
    "MV2_COMM_WORLD_SIZE": "8",
    "MV2_COMM_WORLD_LOCAL_RANK": "1",
    "MV2_COMM_WORLD_LOCAL_SIZE": "2",
    "PMI_ID": "3",
}
MVAPICH = {key.replace("MV2", "MVP"): value for key, value in MVAPICH2.items()}
DEEPSPEED = {
    "RANK": "3",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_SIZE": "2",
    "CROSS_RANK": "1",
    "CROSS_SIZE": "4",
    "MASTER_ADDR": "n1",
}
SUBMITIT_LOCAL = {
    "SUBMITIT_EXECUTOR": "local",
    "SUBMITIT_LOCAL_JOB_ID": "5236",
    "SUBMITIT_LOCAL_JOB_NUM_NODES": "1",
    "SUBMITIT_LOCAL_NODEID": "0",
    "SUBMITIT_LOCAL_NTASKS": "2",
    "SUBMITIT_LOCAL_GLOBALID": "1",
    "SUBMITIT_LOCAL_LOCALID": "1",
}
BATCH = {
    "SLURM_JOB_ID": "7",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "5",
    "SLURM_TASKS_PER_NODE": "2(x2),1",
}
SRUN = {
    **BATCH,
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
}


def without(environ: dict[str, str], key: str) -> dict[str, str]:
    return {k: v for k, v in environ.items() if k != key}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, NO_LAUNCHER),
        (
            {
                "HOROVOD_CYCLE_TIME": "0.1",
                "OMPI_MCA_btl": "self",
                "PMIX_MCA_mca_base_component_show_load_errors": "1",
            },
            NO_LAUNCHER,
        ),
        (OPEN_MPI, Placement(3, 8, 1, 2, "Open MPI's mpirun")),
        (HOROVODRUN, Placement(3, 8, 1, 2, "horovodrun")),
        (HYDRA, Placement(3, 8, 1, 2, "Hydra's mpiexec")),
        (TORCHRUN, Placement(3, 8, 1, 2, "torchrun")),
        (FLUX, Placement(3, 8, 1, 2, "Flux")),
        (
            {**FLUX, "PALS_RANKID": "3", "PALS_NODEID": "1"},
            Placement(3, 8, 1, 2, "Flux"),
        ),  # flux run -o pmi=cray-pals
        (PALS, Placement(3, 8, 1, 2, "PALS' mpiexec")),
        # PALS of 2020: no PALS_LOCAL_SIZE
        (
            {**without(PALS, "PALS_LOCAL_SIZE"), "PMI_LOCAL_SIZE": "2", "PMI_LOCAL_RANK": "1"},
            Placement(3, 8, 1, 2, "PALS' mpiexec"),
        ),
        (
            {**PALS, "PMI_LOCAL_SIZE": "2", "PMI_LOCAL_RANK": "1"},
            Placement(3, 8, 1, 2, "PALS' mpiexec"),
        ),
        (
            {**without(PALS, "PMI_RANK"), "PMIX_RANK": "3"},
            Placement(3, 8, 1, 2, "PALS' mpiexec"),
        ),  # --pmi=pmix --env PMI_SIZE=8
        (JSRUN, Placement(3, 8, 1, 2, "jsrun")),
        ({**JSRUN, **OPEN_MPI}, Placement(3, 8, 1, 2, "jsrun")),  # Spectrum MPI
        (MVAPICH2, Placement(3, 8, 1, 2, "MVAPICH2's mpirun_rsh")),
        (MVAPICH, Placement(3, 8, 1, 2, "MVAPICH's mpirun_rsh")),  # 3 and 4
        (
            {**MVAPICH2, "PMI_RANK": "3", "PMI_SIZE": "8"},
            Placement(3, 8, 1, 2, "MVAPICH2's mpirun_rsh"),
        ),
        (
            {**HYDRA, "MVP_COMM_WORLD_LOCAL_RANK": "1", "MV2_COMM_WORLD_LOCAL_RANK": "1"},
            Placement(3, 8, 1, 2, "Hydra's mpiexec"),
        ),
        (DEEPSPEED, Placement(3, 8, 1, 2, "deepspeed")),
        (SUBMITIT_LOCAL, Placement(1, 2, 1, 2, "submitit's local executor")),
        (
            {**OPEN_MPI, **SUBMITIT_LOCAL},
            Placement(3, 8, 1, 2, "Open MPI's mpirun"),
        ),  # its function starts mpirun
        (
            {"SUBMITIT_LOCAL_NTASKS": "2", "SUBMITIT_LOCAL_JOB_NUM_NODES": "1"},
            NO_LAUNCHER,
        ),  # its controller, which starts the tasks
        (
            {**OPEN_MPI, "LSF_PM_TASKID": "2"},
            Placement(3, 8, 1, 2, "Open MPI's mpirun"),
        ),  # blaunch started mpirun's daemon
        (
            {"RANK": "3", "LOCAL_RANK": "1"},
            NO_LAUNCHER,
        ),  # anyone may call a variable of his own RANK
        ({"WORLD_SIZE": "1", "MASTER_ADDR": "n1"}, NO_LAUNCHER),
        (
            {**SRUN, **TORCHRUN, "RANK": "3", "WORLD_SIZE": "5", "HVDTRAIN_LAUNCH": "1"},
            Placement(3, 5, 1, 2, "srun"),
        ),  # launch --slurm
        (
            {**SRUN, **TORCHRUN, "HVDTRAIN_LAUNCH": "1", "TORCHELASTIC_RUN_ID": "x"},
            Placement(3, 8, 1, 2, "torchrun"),
        ),  # in a script of it
        (
            {**TORCHRUN, **SRUN, "SLURM_PROCID": "1"},
            Placement(3, 8, 1, 2, "torchrun"),
        ),  # srun starts a torchrun on each node
        (
            {**OPEN_MPI, **TORCHRUN},
            Placement(3, 8, 1, 2, "Open MPI's mpirun"),
        ),  # a wrapper that translates
        ({**OPEN_MPI, "RANK": "3", "WORLD_SIZE": "8"}, Placement(3, 8, 1, 2, "Open MPI's mpirun")),
        (
            {**SRUN, "RANK": "3", "WORLD_SIZE": "5", "LOCAL_RANK": "1"},
            Placement(3, 5, 1, 2, "srun"),
        ),
        (SRUN, Placement(3, 5, 1, 2, "srun")),
        (
            {**SRUN, "SLURM_PROCID": "4", "SLURM_LOCALID": "0", "SLURM_NODEID": "2"},
            Placement(4, 5, 0, 1, "srun"),
        ),
        (BATCH, NO_LAUNCHER),
        ({**BATCH, "SLURM_STEP_ID": "4294967291", "SLURM_STEP_NUM_TASKS": "1"}, NO_LAUNCHER),
        ({**OPEN_MPI, **HOROVODRUN}, Placement(3, 8, 1, 2, "Open MPI's mpirun")),
        ({**OPEN_MPI, **SRUN, "SLURM_PROCID": "0"}, Placement(3, 8, 1, 2, "Open MPI's mpirun")),
        (
            {**OPEN_MPI, **SRUN, "SLURM_STEP_TASKS_PER_NODE": "?"},
            Placement(3, 8, 1, 2, "Open MPI's mpirun"),
        ),
        ({**HYDRA, **BATCH}, Placement(3, 8, 1, 2, "Hydra's mpiexec")),
        (
            {**SRUN, "PMI_RANK": "3", "PMI_SIZE": "5", "PMI_FD": "9"},
            Placement(3, 5, 1, 2, "srun"),
        ),  # srun --mpi=pmi2
    ],
)
def test_placement(environ: dict[str, str], expected: Placement) -> None:
    assert placement(environ) == expected


def test_a_pod_without_a_local_rank_is_refused_with_what_to_set() -> None:
    """Kubernetes' PyTorchJob: RANK and WORLD_SIZE of each pod."""
    with pytest.raises(UserError) as caught:
        placement(
            {"RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"}
        )
    what, where, fix = str(caught.value).splitlines()
    assert (
        what == "torchrun set some of its variables, but not LOCAL_RANK, LOCAL_WORLD_SIZE"
        and where == "  where: the environment"
    )
    assert fix.startswith(
        "  fix: torchrun --nproc-per-node N sets all four; or set LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 "
        "where each host (or pod) has one"
    )
    with pytest.raises(UserError, match="but not LOCAL_WORLD_SIZE"):
        placement(without(TORCHRUN, "LOCAL_WORLD_SIZE"))


RECORDED = sorted((Path(__file__).parents[1] / "support" / "launchers").glob("*.json"))


@pytest.mark.parametrize("path", RECORDED, ids=[path.stem for path in RECORDED])
def test_a_recorded_launcher(path: Path) -> None:
    """Real environments (record_launcher.py): the placements are those that the processes and their
    hosts allow, and no others."""
    recorded = json.loads(path.read_text())
    processes = recorded["processes"]
    hosts = [process["host"] for process in processes]
    for process in processes:
        place = placement({**recorded["environ"], **process["environ"]})
        assert [place.rank, place.size, place.local_rank, place.local_size] == process["place"]
        assert place.launcher == recorded["launcher"]
        assert (place.size, place.local_size) == (len(processes), hosts.count(process["host"]))
    assert [process["place"][0] for process in processes] == list(range(len(processes)))
    for host in set(hosts):
        assert sorted(p["place"][2] for p in processes if p["host"] == host) == list(
            range(hosts.count(host))
        )


def test_the_launchers_that_were_recorded() -> None:
    assert {path.stem for path in RECORDED} >= {
        *(
            "openmpi4",
            "openmpi5",
            "openmpi5-by-node",
            "mpich4",
            "mpich5",
            "intelmpi",
            "torchrun",
            "horovodrun",
            "submitit",
        ),
        *("srun-none", "srun-pmi2", "srun-pmix", "srun-cyclic", "srun-torchrun"),
        *("sbatch-batch", "sbatch-mpirun", "sbatch-mpich5", "sbatch-intelmpi"),
    }


@pytest.mark.parametrize(
    "environ",
    [OPEN_MPI, HOROVODRUN, HYDRA, FLUX, JSRUN, MVAPICH2, MVAPICH],
    ids=["mpirun", "horovodrun", "mpiexec", "flux", "jsrun", "mvapich2", "mvapich"],
)
def test_a_missing_variable_is_named(environ: dict[str, str]) -> None:
    launcher = next(launcher for launcher in LAUNCHERS if launcher.rank in environ)
    assert set(launcher.variables) <= set(environ)
    for key in sorted({*launcher.variables} - {*launcher.needs}):
        with pytest.raises(UserError, match=f"set some of its variables, but not {key}"):
            placement(without(environ, key))


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        (
            without(SRUN, "SLURM_STEP_NUM_TASKS"),
            "srun set SLURM_PROCID=3, but not SLURM_STEP_NUM_TASKS",
        ),
        (without(SRUN, "SLURM_LOCALID"), "srun set some of its variables, but not SLURM_LOCALID"),
        (without(SRUN, "SLURM_NODEID"), "but not SLURM_NODEID"),
        (without(SRUN, "SLURM_STEP_TASKS_PER_NODE"), "but not SLURM_STEP_TASKS_PER_NODE"),
        (
            {**SRUN, "PMI_RANK": "0", "PMI_SIZE": "1"},
            "Hydra's mpiexec set some of its variables, but not MPI_LOCALRANKID, MPI_LOCALNRANKS",
        ),
        (
            {"PMI_RANK": "1", "PMI_SIZE": "2"},
            "but not MPI_LOCALRANKID, MPI_LOCALNRANKS\n.*\n  fix: mpiexec.hydra ",
        ),  # MPICH's mpiexec.gforker
        (
            {"MV2_COMM_WORLD_LOCAL_RANK": "1"},
            "MVAPICH2's mpirun_rsh set some of its variables, but not MV2_COMM_WORLD_RANK",
        ),
        (
            {**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "two"},
            "OMPI_COMM_WORLD_SIZE='two' is not a whole number",
        ),
        (
            {**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "8"},
            "rank 8 of 8, .*: these numbers are impossible",
        ),
        (
            {**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "-1"},
            "rank -1 of 8, .*: these numbers are impossible",
        ),
        (
            {**HYDRA, "MPI_LOCALRANKID": "2"},
            "local rank 2 of 2: these numbers are impossible\n.*Hydra's mpiexec",
        ),
        ({**HYDRA, "MPI_LOCALNRANKS": "9"}, "local rank 1 of 9: these numbers are impossible"),
        (
            {**SRUN, "SLURM_STEP_TASKS_PER_NODE": "2(2),1"},
            r"SLURM_STEP_TASKS_PER_NODE='2\(2\),1' is not like 2\(x2\),1",
        ),
        (
            {**SRUN, "SLURM_NODEID": "3"},
            "SLURM_NODEID=3, but SLURM_STEP_TASKS_PER_NODE lists 3 nodes",
        ),
        (
            {**OPEN_MPI, **HYDRA, "PMI_SIZE": "4"},
            "Open MPI's mpirun says rank 3 of 8, but Hydra's mpiexec says rank 3 of 4",
        ),
        (
            {**OPEN_MPI, **TORCHRUN, "WORLD_SIZE": "4"},
            "Open MPI's mpirun says rank 3 of 8, but torchrun says rank 3 of 4",
        ),
        (
            {**OPEN_MPI, "RANK": "3", "WORLD_SIZE": "4"},
            "torchrun set some of its variables, but not LOCAL_RANK, LOCAL_WORLD_SIZE",
        ),
        ({**TORCHRUN, "RANK": "x"}, "RANK='x' is not a whole number"),
        (
            {**TORCHRUN, "LOCAL_RANK": "2"},
            "local rank 2 of 2: these numbers are impossible\n.*torchrun",
        ),
        (
            {**FLUX, "FLUX_JOB_NNODES": "3"},
            "Flux started 8 processes on 3 nodes, and does not report how many are on each",
        ),
        (
            {**FLUX, "PMI_RANK": "2"},
            "Hydra's mpiexec set some of its variables, but not MPI_LOCALRANKID, MPI_LOCALNRANKS",
        ),
        (
            without(PALS, "PALS_LOCAL_SIZE"),
            "PALS' mpiexec set some of its variables, but not PMI_LOCAL_SIZE",
        ),
        (
            {**without(without(PALS, "PMI_SIZE"), "PMI_RANK"), "PMIX_RANK": "3"},
            "PALS' mpiexec set some of its variables, but not PMI_SIZE\n.*\n  fix: mpiexec "
            "--pmi=cray, since --pmi=pmix",
        ),
        (
            {**PALS, "PALS_LOCAL_RANKID": "2"},
            "local rank 2 of 2: these numbers are impossible\n.*PALS",
        ),
        (
            {**DEEPSPEED, "LOCAL_SIZE": "9"},
            "local rank 1 of 9: these numbers are impossible\n.*deepspeed",
        ),
        (
            {**OPEN_MPI, **HOROVODRUN, "HOROVOD_RANK": "2"},
            "Open MPI's mpirun says rank 3 of 8, but horovodrun says rank 2 of 8",
        ),
    ],
)
def test_contradictory_variables_are_refused(environ: dict[str, str], words: str) -> None:
    with pytest.raises(UserError, match=words):
        placement(environ)


MPICH = EngineLibrary("mpi", "mpi4py uses MPICH Version: 5.0.2", "mend it")
OPEN = EngineLibrary("mpi", "mpi4py uses Open MPI v5.0.11", "mend it")


def test_an_engine_alone_under_a_launcher_is_refused() -> None:
    with pytest.raises(UserError) as caught:
        check_size(placement(OPEN_MPI), MPICH, size=1)
    assert str(caught.value).splitlines() == [
        "Open MPI's mpirun started 8 processes, but the mpi engine sees only itself (size 1)",
        "  where: comm.engine=mpi; mpi4py uses MPICH Version: 5.0.2; the launcher is Open MPI's "
        "mpirun",
        "  fix: mend it",
    ]


def test_srun_without_an_mpi_plugin_is_refused_with_the_plugin() -> None:
    with pytest.raises(
        UserError,
        match=r"srun started 5 processes, .*\n.*\n  fix: srun --mpi=pmix \(Open MPI\) or "
        r"--mpi=pmi2 .*; or mend it",
    ):
        check_size(placement(SRUN), OPEN, size=1)


def test_horovodrun_starts_horovod_only() -> None:
    with pytest.raises(
        UserError,
        match=r"horovodrun started 8 processes, .*\n.*\n  fix: comm.engine=horovod; or mend it",
    ):
        check_size(placement(HOROVODRUN), OPEN, size=1)


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        (TORCHRUN, "torchrun"),
        (DEEPSPEED, "deepspeed"),
        (SUBMITIT_LOCAL, "submitit's local executor"),
    ],
)
def test_launchers_that_start_torch_only(environ: dict[str, str], name: str) -> None:
    with pytest.raises(
        UserError,
        match=rf"{name} started \d processes, .*\n.*\n  fix: comm.engine=torchdist; or mend it",
    ):
        check_size(placement(environ), OPEN, size=1)


def test_library_name() -> None:
    assert (
        library_name("Open MPI v5.0.11, package: Open MPI user@localhost, ident: 5.0.11\0")
        == "Open MPI v5.0.11"
    )
    assert (
        library_name("MPICH Version:      5.0.2\nMPICH Release date: ...") == "MPICH Version: 5.0.2"
    )


def test_sizes_of_engine_and_launcher() -> None:
    check_size(placement(OPEN_MPI), OPEN, size=8)
    check_size(NO_LAUNCHER, OPEN, size=1)
    # a launcher that sets no variables: the library's size counts
    check_size(NO_LAUNCHER, OPEN, size=4)
    with pytest.raises(UserError, match="started 8 processes, but the mpi engine sees 2"):
        check_size(placement(OPEN_MPI), OPEN, size=2)


def test_a_library_of_another_launcher_is_refused_before_it_starts() -> None:
    for environ, good, bad in ((OPEN_MPI, OPEN, MPICH), (HYDRA, MPICH, OPEN)):
        check_library(placement(environ), good)
        with pytest.raises(
            UserError,
            match=r"started 8 processes, but the mpi engine uses another MPI library\n.*mpi4py "
            r"uses",
        ):
            check_library(placement(environ), bad)
    with pytest.raises(UserError, match=r"\n  fix: mend it; or export MPI4PY_LIBMPI=L$"):
        check_library(placement(HYDRA), OPEN._replace(other_library="export MPI4PY_LIBMPI=L"))
    for place in (placement(SRUN), placement(HOROVODRUN), placement(TORCHRUN), NO_LAUNCHER):
        check_library(place, OPEN)
        check_library(place, MPICH)


def test_the_single_engine_is_not_run_many_times() -> None:
    assert isinstance(connect(NO_LAUNCHER), SingleProcessCommunicator)
    with pytest.raises(
        UserError,
        match="Open MPI's mpirun started 8 processes, but the single engine supports only one",
    ):
        connect(placement(OPEN_MPI))


@pytest.mark.parametrize(
    ("sign", "name"),
    [
        ("PMIX_RANK", r"a launcher of PMIx alone \(prterun, prun\)"),
        ("ALPS_APP_PE", "ALPS' aprun"),
        ("LSF_PM_TASKID", "LSF's blaunch"),
        ("MPT_LRANK", "HPE MPT's mpirun"),
    ],
)
def test_a_launcher_without_a_size_is_refused(sign: str, name: str) -> None:
    """Its processes would each train alone."""
    with pytest.raises(
        UserError,
        match=f"{name} started this process, which is not supported: .*\n  where: the "
        f"environment: {sign}=1\n",
    ):
        placement({sign: "1"})
    assert placement({**OPEN_MPI, sign: "3"}).launcher == "Open MPI's mpirun"


@pytest.mark.parametrize(
    "key",
    ["WORLD_SIZE", "NEWMPI_COMM_WORLD_SIZE", "MPI_NRANKS", "MPIRUN_NPROCS", "JAX_NUM_PROCESSES"],
)
def test_a_size_without_a_rank_is_refused(key: str) -> None:
    """Of a launcher that hvdtrain does not know: without this, each of its processes trains
    alone."""
    with pytest.raises(
        UserError,
        match=rf"{key}=8, but no variable gives the rank .* 8 ranks .*\n.*\n  fix: unset {key} if "
        ".* only process; otherwise",
    ):
        placement({key: "8"})
    assert placement({key: "1"}) == placement({key: "many"}) == NO_LAUNCHER
    assert placement({**OPEN_MPI, "NEWMPI_COMM_WORLD_SIZE": "8"}).launcher == "Open MPI's mpirun"


def test_the_local_rank_that_other_launchers_add(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """torch.distributed.launch adds --local-rank=N, deepspeed --local_rank=N, before the arguments
    of the job."""
    for key, value in TORCHRUN.items():
        monkeypatch.setenv(key, value)
    for option in ("--local-rank=1", "--local_rank=1"):
        assert main([option, "--version"]) == DONE
    assert main(["--local_rank=0", "--version"]) == USER
    assert (
        "--local_rank=0, but the environment says local rank 1 of 2\n  where: command line; the "
        "launcher is torchrun" in capsys.readouterr().err
    )
