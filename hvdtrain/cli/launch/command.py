"""python -m hvdtrain launch: the command line that starts ranks with the MPI that is here; prints it, or becomes it."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NoReturn

from hvdtrain.cli.launch.launcher_commands import (
    Host,
    Start,
    contained,
    mpi_kind,
    mpi_words,
    passed_on,
    pick_pmi,
    read_hostfile,
    read_hosts,
    srun_words,
)
from hvdtrain.cli.launch.machine import cores, launcher_of, library_of, nvidia_devices, said, visible_gpus
from hvdtrain.comm.placement import placement
from hvdtrain.config.read import expand, nearest
from hvdtrain.config.yaml_reader import short
from hvdtrain.errors import DONE, UserError

USAGE = """\
python -m hvdtrain launch [-np 8] [-H n1:4,n2:4 | --hostfile FILE] [--dry-run] -- [train | check] [--config FILE] [key=value ...]
  -np 8               ranks; where left out the slots of the hosts, else SLURM_NTASKS, else the GPUs that are visible, else 1
  -H n1:4,n2:4        hosts, and the ranks that each may have; where left out this machine, or what the batch system gave
  --hostfile FILE     the same from lines `n1 slots=4`, `n1:4`, or `n1` repeated, as in $PBS_NODEFILE
  --oversubscribe     more ranks than the hosts have slots (on this machine alone nobody needs to ask)
  --slurm             by srun instead of mpirun
  --container IMAGE   the host's launcher starts ranks inside an Apptainer or Singularity image, which has hvdtrain and a like MPI
  --inside            with --container: by the container's own mpirun, on one host
  --bind DIR          a further folder that the container sees; the current one is always there
  --env NAME          a further variable for the ranks of other hosts; PATH, OMP_*, HOROVOD_*, NCCL_*, HVDTRAIN_* and their like go anyway
  --dry-run           print the command line instead of running it"""
_WHERE = "command line of launch"
_ALLOCATIONS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "PE_HOSTFILE")
_MOST_HOSTFILE_BYTES = 2**24


def launch(words: Sequence[str]) -> int:
    """The command behind `launch`: comes back only from --help and --dry-run, else this process becomes the launcher."""
    place = words.index("--") if "--" in words else len(words)
    own, job = words[:place], words[place + 1 :]
    if {"-h", "--help"} & set(own):
        print(USAGE)
        return DONE
    command = compose(_parse(own), _checked(job), os.environ)
    print(shlex.join(command), file=sys.stdout if "--dry-run" in own else sys.stderr, flush=True)
    if "--dry-run" not in own:
        os.execv(command[0], command)  # signals reach the launcher itself, and its exit code is ours
    return DONE


def compose(asked: argparse.Namespace, job: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """The command line for what is asked, on this machine."""
    if (here := placement(environ)).size > 1:
        what = f"this is already rank {here.rank} of {here.size}, started by {here.launcher}"
        raise UserError(what, _WHERE, "one launcher only: python -m hvdtrain under it, or launch outside of it")
    hosts = _hosts(asked)
    away = bool(hosts) or any(name in environ for name in _ALLOCATIONS)
    ranks = _ranks(asked, hosts, environ)
    crowded = asked.oversubscribe or (not (away or asked.slurm) and ranks > cores())
    box = _container(asked)
    python = [*box, "python3"] if box else [sys.executable]
    start = Start(
        "", ranks, (*python, "-m", "hvdtrain", *job), hosts, passed_on(environ, asked.env) if away else (), os.geteuid() == 0, crowded
    )
    if asked.slurm:
        return _by_srun(start, library_of(python), environ)
    if not asked.inside:
        path, kind = launcher_of(library_of(python))
        return mpi_words(kind, replace(start, launcher=path))
    kind = mpi_kind(said([*box, "mpirun", "--version"])) or _refuse_inside(asked.container)
    alone = replace(
        start, launcher="mpirun", program=("python3", "-m", "hvdtrain", *job), hosts=(), passed=(), oversubscribe=ranks > cores()
    )
    return [*box, *mpi_words(kind, alone)]


def _by_srun(start: Start, library: str, environ: Mapping[str, str]) -> list[str]:
    srun = shutil.which("srun")
    if srun is None:
        raise UserError("no srun here", "--slurm, PATH", "on a SLURM cluster's login node or inside a job; elsewhere without --slurm")
    cores = environ.get("SLURM_CPUS_PER_TASK", "")
    pmi = pick_pmi(said([srun, "--mpi=list"]), mpi_kind(library))
    return srun_words(replace(start, launcher=srun), pmi, int(cores) if cores.isdecimal() else None)


def _refuse_inside(image: str) -> NoReturn:
    fix = "an image with mpirun on its PATH; or without --inside, by the host's mpirun"
    raise UserError("the container has no mpirun that is known here", f"--inside, {short(image)}", fix)


def _container(asked: argparse.Namespace) -> list[str]:
    """The words before a program that runs in the container; none without one."""
    if asked.container is None:
        if asked.inside or asked.bind:
            raise UserError(f"{'--inside' if asked.inside else '--bind'} is of a container, and there is none", _WHERE, "--container IMAGE")
        return []
    if asked.inside and (asked.hosts or asked.hostfile or asked.slurm):
        what = "the container's own mpirun starts ranks on one host: it knows no way out of the container"
        raise UserError(what, "--inside with -H, --hostfile or --slurm", "without --inside: the host's launcher starts ranks in containers")
    runtime = shutil.which("apptainer") or shutil.which("singularity")
    if runtime is None:
        raise UserError("neither apptainer nor singularity here", "--container, PATH", "load the site's module, or install apptainer")
    image = expand(asked.container, "--container").absolute()
    if not image.exists():
        fix = "the path of a .sif file or of an unpacked image; fetch one first: apptainer pull image.sif docker://..."
        raise UserError(f"there is no image {image}", "--container", fix)
    folders = [os.getcwd(), *(str(expand(folder, "--bind").absolute()) for folder in asked.bind)]
    return contained(runtime, str(image), folders, nvidia_devices() > 0, ())


def _hosts(asked: argparse.Namespace) -> tuple[Host, ...]:
    if asked.hosts and asked.hostfile:
        raise UserError("-H and --hostfile both name hosts", _WHERE, "one of them")
    if asked.hosts is not None:
        return read_hosts(asked.hosts)
    if asked.hostfile is None:
        return ()
    try:
        with expand(asked.hostfile, "--hostfile").open(encoding="utf-8") as file:
            return read_hostfile(file.read(_MOST_HOSTFILE_BYTES).splitlines(), asked.hostfile)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the hosts: {error}", "--hostfile", "a text file, with a host in each line: n1 slots=4") from None


def _ranks(asked: argparse.Namespace, hosts: Sequence[Host], environ: Mapping[str, str]) -> int:
    slots = sum(host.slots for host in hosts)
    tasks = environ.get("SLURM_NTASKS", "")
    if asked.ranks is None:
        return slots or (int(tasks) if tasks.isdecimal() else 0) or visible_gpus(environ) or 1
    if not re.fullmatch("[1-9][0-9]{0,6}", asked.ranks):
        raise UserError(f"-np {short(asked.ranks)} is no number of ranks", _WHERE, "1 or more, as in -np 8")
    ranks = int(asked.ranks)
    if hosts and ranks > slots and not asked.oversubscribe:
        room = ",".join(f"{host.name}:{-(-ranks * host.slots // slots)}" for host in hosts)
        shown = ",".join(f"{host.name}:{host.slots}" for host in hosts)
        fix = f"-np {slots}; or more slots, as in -H {short(room)}; or --oversubscribe"
        raise UserError(f"{ranks} ranks, but the hosts have {slots} slot{'s' * (slots > 1)}", f"-np {ranks}, hosts {short(shown)}", fix)
    return ranks


def _checked(job: Sequence[str]) -> list[str]:
    """The words behind --: those of train or check."""
    if job and not job[0].startswith("-") and "=" not in job[0] and job[0] not in ("train", "check"):
        what = f"'{short(job[0])}' is nothing that ranks do"
        raise UserError(
            what, f"{_WHERE}, behind --", "train (or nothing), check, or key=value words; without launch: python -m hvdtrain ..."
        )
    return list(job)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(message, _WHERE, "launch --help lists what it takes")


def _parse(words: Sequence[str]) -> argparse.Namespace:
    parser = _Parser(prog="python -m hvdtrain launch", add_help=False, allow_abbrev=False)
    parser.add_argument("-np", "-n", dest="ranks")
    parser.add_argument("-H", "--hosts", dest="hosts")
    for option in ("--hostfile", "--container"):
        parser.add_argument(option)
    for option in ("--env", "--bind"):
        parser.add_argument(option, action="append", default=[])
    for option in ("--oversubscribe", "--slurm", "--inside", "--dry-run"):
        parser.add_argument(option, action="store_true")
    asked, rest = parser.parse_known_args(words)
    if rest:
        known = [option for action in parser._actions for option in action.option_strings]
        behind = "=" in rest[0] or not rest[0].startswith("-")
        fix = f"what ranks are to do stands behind --: launch ... -- {short(rest[0])}" if behind else nearest(rest[0], known)
        raise UserError(f"cannot read the word '{short(rest[0])}'", _WHERE, fix)
    return asked
