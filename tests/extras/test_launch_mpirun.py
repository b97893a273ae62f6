"""The mpirun of this machine: its kind from recorded versions, and its command line."""

from __future__ import annotations

import pytest

from hvdtrain.extras.launch.mpirun import (
    Host,
    LaunchRequest,
    MpiKind,
    identify_mpi,
    is_compatible,
    mpirun_command,
    ranks_per_host,
)

# The first lines that real launchers and libraries printed, and two that are unknown.
RECORDED: list[tuple[str, MpiKind | None]] = [
    (
        "mpirun (Open MPI) 5.0.11\n\nReport bugs to https://www.open-mpi.org/community/help/\n",
        "openmpi5",
    ),  # wheel
    (
        "mpirun (Open MPI) 4.1.4\n\nReport bugs to http://www.open-mpi.org/community/help/\n",
        "openmpi4",
    ),  # Debian 12, mpirun
    (
        "mpirun.openmpi (OpenRTE) 4.1.4\n\nReport bugs to "
        "http://www.open-mpi.org/community/help/\n",
        "openmpi4",
    ),  # under its own name
    (
        "HYDRA build details:\n    Version:                                 4.0.2\n",
        "mpich",
    ),  # Debian 12
    (
        "HYDRA build details:\n    Version:                                 5.0.2\n    CC:        "
        "    cc\n",
        "mpich",
    ),  # wheel
    (
        "Intel(R) MPI Library for Linux* OS, Version 2021.18.1 Build 20260626 (id: "
        "b44796a)\nCopyright 2003-2026\n",
        "intel",
    ),  # wheel
    (
        "Open MPI v5.0.11, package: Open MPI user@localhost Distribution, ident: 5.0.11, repo "
        "rev: v5.0.11rc1, Sep 16, 2026",
        "openmpi5",
    ),
    (
        "MPICH Version:      5.0.2\nMPICH Release date: Fri Sep 25 20:45:26 UTC 2026\n",
        "mpich",
    ),  # mpi4py --mpi-lib-version
    ("Intel(R) MPI Library 2021.18.1 for Linux* OS\n", "intel"),
    ("prterun (PRRTE) 3.0.13\n", None),
    ("", None),
]
EVEN = (Host("n1", 4), Host("n2", 4))
UNEVEN = (Host("n1", 3), Host("n2", 1))
MPI_TABLE: list[tuple[MpiKind, dict[str, object], str]] = [
    ("openmpi5", {"ranks": 2}, "mpirun -np 2 --bind-to none python train"),
    (
        "openmpi5",
        {"ranks": 4, "as_root": True, "oversubscribe": True},
        "mpirun --allow-run-as-root -np 4 --bind-to none --map-by :OVERSUBSCRIBE python train",
    ),
    (
        "openmpi5",
        {"ranks": 8, "hosts": EVEN, "forwarded": ("OMP_NUM_THREADS", "PATH")},
        "mpirun -np 8 -H n1:4,n2:4 --bind-to none -x OMP_NUM_THREADS -x PATH python train",
    ),
    (
        "openmpi5",
        {"ranks": 2, "fault_tolerant": True},
        "mpirun --with-ft ulfm -np 2 --bind-to none python train",
    ),
    ("openmpi4", {"ranks": 2, "fault_tolerant": True}, "mpirun -np 2 --bind-to none python train"),
    (
        "openmpi4",
        {"ranks": 4, "hosts": UNEVEN},
        "mpirun -np 4 -H n1:3,n2:1 --bind-to none python train",
    ),
    (
        "openmpi4",
        {"ranks": 3, "oversubscribe": True},
        "mpirun -np 3 --bind-to none --map-by :OVERSUBSCRIBE python train",
    ),
    (
        "mpich",
        {"ranks": 2, "as_root": True, "oversubscribe": True},
        "mpirun -bind-to none -np 2 python train",
    ),
    (
        "mpich",
        {"ranks": 8, "hosts": EVEN, "forwarded": ("OMP_NUM_THREADS", "PATH")},
        "mpirun -bind-to none -genvlist OMP_NUM_THREADS,PATH -hosts n1:4,n2:4 -np 8 python train",
    ),
    (
        "mpich",
        {"ranks": 4, "hosts": UNEVEN},
        "mpirun -bind-to none -hosts n1:3,n2:1 -np 4 python train",
    ),
    ("intel", {"ranks": 2}, "mpirun -genv I_MPI_PIN off -np 2 python train"),
    (
        "intel",
        {"ranks": 8, "hosts": EVEN, "forwarded": ("OMP_NUM_THREADS", "PATH")},
        "mpirun -genv I_MPI_PIN off -genvlist OMP_NUM_THREADS,PATH -hosts n1,n2 -ppn 4 -np 8 "
        "python train",
    ),
    (
        "intel",
        {"ranks": 4, "hosts": UNEVEN},
        "mpirun -genv I_MPI_PIN off -host n1 -np 3 python train : -host n2 -np 1 python train",
    ),
    (
        "intel",
        {"ranks": 3, "hosts": EVEN},
        "mpirun -genv I_MPI_PIN off -hosts n1 -ppn 3 -np 3 python train",
    ),
]


@pytest.mark.parametrize(("text", "kind"), RECORDED)
def test_kind_of_mpi(text: str, kind: MpiKind | None) -> None:
    assert identify_mpi(text) == kind


def test_which_launcher_is_compatible_with_which_library() -> None:
    kinds: list[MpiKind] = ["openmpi4", "openmpi5", "mpich", "intel"]
    assert [
        (one, two) for one in kinds for two in kinds if one < two and is_compatible(one, two)
    ] == [("intel", "mpich")]
    assert all(is_compatible(kind, kind) for kind in kinds)


@pytest.mark.parametrize(("kind", "options", "command"), MPI_TABLE)
def test_command_of_each_mpi(kind: MpiKind, options: dict[str, object], command: str) -> None:
    assert (
        mpirun_command(
            kind,
            LaunchRequest(launcher="mpirun", program=("python", "train"), **options),  # type: ignore[arg-type]
        )
        == command.split()
    )


def test_ranks_fill_the_slots_host_by_host() -> None:
    assert ranks_per_host(EVEN, 5) == [Host("n1", 4), Host("n2", 1)]
    assert ranks_per_host(EVEN, 3) == [Host("n1", 3)]
    # three more than slots, one by one
    assert ranks_per_host(UNEVEN, 7) == [
        Host("n1", 5),
        Host("n2", 2),
    ]
    assert ranks_per_host((), 7) == []
