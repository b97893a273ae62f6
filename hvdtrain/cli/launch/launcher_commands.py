"""The command line that starts ranks, for each MPI and for srun: pure functions from what is asked and what is here to words."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from hvdtrain.config.yaml_reader import short
from hvdtrain.errors import UserError

Kind = Literal["openmpi4", "openmpi5", "mpich", "intel"]  # openmpi4: and older
NAMES: dict[Kind, str] = {"openmpi4": "Open MPI 4 or older", "openmpi5": "Open MPI 5", "mpich": "MPICH", "intel": "Intel MPI"}

# What ranks on other hosts get of this environment, names that look like a secret excepted.
_PASSED = ("PATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "XDG_CACHE_HOME")
_PASSED_PREFIXES = (
    *("HVDTRAIN_", "HOROVOD_", "NCCL_", "GLOO_", "CUDA_", "TORCH_", "JAX_", "XLA_"),
    *("OMP_", "MKL_", "KMP_", "UCX_", "FI_", "I_MPI_", "MPICH_", "PYTHON"),
)
_SECRET = re.compile("TOKEN|SECRET|PASS|KEY|CREDENTIAL|AUTH")
_HOST = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)(?::([0-9]{1,6}))?")
_HOST_FIX = "hosts and the ranks that each may have, as in -H n1:4,n2:4"


class Host(NamedTuple):
    name: str
    slots: int  # ranks that it may have


@dataclass(frozen=True)
class Start:
    """What is to be started, and by what."""

    launcher: str  # the path of mpirun or srun
    ranks: int
    program: tuple[str, ...]  # of one rank
    hosts: tuple[Host, ...] = ()  # none: this machine, or what the batch system gave
    passed: tuple[str, ...] = ()  # names of variables for the ranks of other hosts
    root: bool = False
    oversubscribe: bool = False  # more ranks than slots


def mpi_words(kind: Kind, start: Start) -> list[str]:
    """The command line of an MPI's own launcher; ranks fill the slots host by host, and no rank is pinned to a core."""
    if kind in ("openmpi4", "openmpi5"):
        return _open_mpi(start)
    return _intel(start) if kind == "intel" else _mpich(start)


def _open_mpi(start: Start) -> list[str]:
    """The words that Open MPI 4 and 5 both know: --oversubscribe is gone from 5, :OVERSUBSCRIBE does in 4 too."""
    words = [start.launcher, *["--allow-run-as-root"] * start.root, "-np", str(start.ranks)]
    words += ["-H", ",".join(f"{host.name}:{host.slots}" for host in start.hosts)] if start.hosts else []
    words += ["--bind-to", "none", *["--map-by", ":OVERSUBSCRIBE"] * start.oversubscribe]
    for name in start.passed:
        words += ["-x", name]
    return [*words, *start.program]


def _mpich(start: Start) -> list[str]:
    words = [start.launcher, "-bind-to", "none", *_only(start.passed)]
    words += ["-hosts", ",".join(f"{host.name}:{host.slots}" for host in start.hosts)] if start.hosts else []
    return [*words, "-np", str(start.ranks), *start.program]


def _intel(start: Start) -> list[str]:
    """Intel's launcher takes `-bind-to none` and the :4 of `-hosts n1:4` without a word, and ignores both (2021.18)."""
    words = [start.launcher, "-genv", "I_MPI_PIN", "off", *_only(start.passed)]
    shares = deal(start.hosts, start.ranks)
    if len({share.slots for share in shares}) <= 1:
        names = ",".join(share.name for share in shares)
        words += ["-hosts", names, "-ppn", str(shares[0].slots)] if shares else []
        return [*words, "-np", str(start.ranks), *start.program]
    for share in shares:
        words += ["-host", share.name, "-np", str(share.slots), *start.program, ":"]
    return words[:-1]


def _only(passed: Sequence[str]) -> list[str]:
    """Hydra would send the whole environment to other hosts."""
    return ["-genvlist", ",".join(passed)] if passed else []


def srun_words(start: Start, pmi: str, cores: int | None) -> list[str]:
    """srun's command line; its tasks get this environment by srun's own rules. `cores` of each rank: srun no longer inherits sbatch's."""
    words = [start.launcher, f"--mpi={pmi}", "--kill-on-bad-exit=1", "-n", str(start.ranks)]
    shares = deal(start.hosts, start.ranks)
    if len({share.slots for share in shares}) > 1:
        what = f"srun deals out ranks evenly, not {', '.join(f'{share.slots} to {share.name}' for share in shares)}"
        raise UserError(what, "--slurm, -H", "the same number of ranks on each host; or, inside an allocation, launch without --slurm")
    if shares:
        words += ["-N", str(len(shares)), f"--ntasks-per-node={shares[0].slots}", "-w", ",".join(share.name for share in shares)]
    words += [f"--cpus-per-task={cores}"] if cores else []
    words += ["--overcommit"] * start.oversubscribe
    return [*words, *start.program]


def deal(hosts: Sequence[Host], ranks: int) -> list[Host]:
    """How many ranks each host gets: slots are filled host by host, ranks beyond all slots go round; hosts without a rank are left out."""
    shares, left = [], ranks
    for host in hosts:
        shares.append(min(host.slots, left))
        left -= shares[-1]
    for place in range(left if hosts else 0):
        shares[place % len(hosts)] += 1
    return [Host(host.name, share) for host, share in zip(hosts, shares, strict=True) if share]


def contained(runtime: str, image: str, folders: Sequence[str], nvidia: bool, program: Sequence[str]) -> list[str]:
    """`program` inside an image of Apptainer or Singularity, in the folder that comes first; `nvidia`: with the host's driver."""
    for folder in folders:
        if re.search("[:,]", folder):
            raise UserError(f"a folder with : or , in its name cannot be bound: {short(folder)}", "--container", "another folder")
    binds = [word for folder in dict.fromkeys(folders) for word in ("--bind", folder)]
    return [runtime, "exec", *["--nv"] * nvidia, *binds, "--pwd", folders[0], image, *program]


def read_hosts(text: str) -> tuple[Host, ...]:
    """ "n1:4,n2" -> 4 slots and 1; a host that is named twice has the sum."""
    return _summed(_host(part, f"-H {short(text)}") for part in text.split(","))


def read_hostfile(lines: Iterable[str], path: str) -> tuple[Host, ...]:
    """Lines `n1 slots=4`, `n1:4` or `n1`, as Open MPI, Hydra and PBS write them; # begins a comment."""
    hosts = []
    for number, line in enumerate(lines, 1):
        name, *rest = re.sub(r"\s*=\s*", "=", line.partition("#")[0]).split() or [""]
        slots = next((word.partition("=")[2] for word in rest if word.startswith("slots=")), None)
        if name:
            hosts.append(_host(f"{name}:{slots}" if slots is not None else name, f"{path}:{number}"))
    if not hosts:
        raise UserError("no host in the file", path, "a host in each line, as in: n1 slots=4")
    return _summed(hosts)


def _host(text: str, where: str) -> Host:
    match = _HOST.fullmatch(text.strip())
    if not match or (match[2] is not None and not int(match[2])):
        more = "; scontrol show hostnames writes out n[1-4]" if "[" in text else ""
        raise UserError(f"cannot read the host '{short(text)}'", where, f"{_HOST_FIX}{more}")
    return Host(match[1], int(match[2] or 1))


def _summed(hosts: Iterable[Host]) -> tuple[Host, ...]:
    slots: dict[str, int] = {}
    for host in hosts:
        slots[host.name] = slots.get(host.name, 0) + host.slots
    return tuple(Host(name, count) for name, count in slots.items())


def passed_on(environ: Mapping[str, str], asked: Sequence[str]) -> tuple[str, ...]:
    """Names of the variables that ranks on other hosts need, of those that are set; and those that the user names."""
    for name in asked:
        if name not in environ:
            what = f"--env {short(name)}: no such variable is set here"
            raise UserError(what, "command line of launch", "give the name alone, and set it before: export NAME=VALUE")
    known = [name for name in environ if name in _PASSED or (name.startswith(_PASSED_PREFIXES) and not _SECRET.search(name))]
    return tuple(sorted({*known, *asked}))


def mpi_kind(version: str) -> Kind | None:
    """Which MPI, from what its launcher says to --version, or its library of itself; None: none that is known here."""
    if match := re.search(r"\((?:Open ?MPI|Open ?RTE|Open MPI)\) (\d+)|Open MPI v(\d+)", version):
        return "openmpi5" if int(match[1] or match[2]) >= 5 else "openmpi4"
    if "Intel(R) MPI" in version:
        return "intel"
    return "mpich" if re.search("HYDRA|MPICH|MVAPICH", version) else None


def fits(launcher: Kind, library: Kind) -> bool:
    """Whether a launcher starts ranks of a library: Open MPI of the same generation, or both with Hydra's interface."""
    return launcher == library or {launcher, library} <= {"mpich", "intel"}


def pick_pmi(listed: str, library: Kind | None) -> str:
    """The interface between srun and an MPI library, of those that `srun --mpi=list` names; without a library none is needed."""
    known = set(re.findall(r"[a-z]+[a-z0-9_]*", listed))
    wanted = {None: ("none",), "openmpi4": ("pmix", "pmi2"), "openmpi5": ("pmix",), "mpich": ("pmi2", "cray_shasta"), "intel": ("pmi2",)}
    found = next((name for name in wanted[library] if name in known), None)
    if found is None:
        name, needs = NAMES[library or "mpich"], " or ".join(wanted[library])
        what = f"this srun has no --mpi={needs}, which {name} needs; ranks would each train alone"
        fix = "in an allocation, launch without --slurm: mpirun; or ask the site for SLURM's plugin"
        raise UserError(what, f"srun --mpi=list: {short(' '.join(listed.split()))}", fix)
    return found
