"""hvdtrain launch: finds the command that starts ranks with the MPI of this machine, prints it and
runs it."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace

from hvdtrain.cli.options import CommandParser
from hvdtrain.comm.cores.shares import BINDS
from hvdtrain.comm.driver_files import HERE
from hvdtrain.comm.launcher_variables import placement
from hvdtrain.comm.rendezvous import SECRET, free_port, new_secret
from hvdtrain.config.read import expand
from hvdtrain.errors import DONE, UserError, nearest, short
from hvdtrain.extras.launch.allocation import (
    Allocation,
    find_allocation,
    read_hostfile,
    read_hosts,
    read_text,
)
from hvdtrain.extras.launch.elastic import launch_elastic
from hvdtrain.extras.launch.forwarded_variables import forwarded_variables
from hvdtrain.extras.launch.launch_commands import (
    MPIS,
    command_for,
    container_command,
    select_pmi,
    srun_command,
)
from hvdtrain.extras.launch.mpirun import (
    Host,
    LaunchRequest,
    MpiLauncher,
    available_cores,
    find_launcher,
    identify_mpi,
    mpi_library_version,
    mpirun_command,
    output_of,
    ranks_per_host,
)
from hvdtrain.extras.launch.program import rank_command, value_of
from hvdtrain.extras.launch.run import LauncherRun
from hvdtrain.extras.launch.words import Program, check_exists, read_program

USAGE = """\
hvdtrain launch [-np 8] [-H n1:4,n2:4 | --hostfile FILE] [--dry-run] -- [train | check] [--config FILE] [key=value ...]
hvdtrain launch [-np 8] [-H n1:4,n2:4 | --hostfile FILE] [--logs DIR] [--plain] -- script.py | python -m MODULE | PROGRAM [arguments]
  -np 8               ranks; default: SLURM_NTASKS, else the slots of the hosts, else the visible GPUs, else 1
  -H n1:4,n2:4        hosts, and the slots (ranks) of each; default: those of the batch job that this is, else this machine
  --hostfile FILE     the same from lines `n1 slots=4`, `n1:4`, or `n1` repeated, as in $PBS_NODEFILE, $COBALT_NODEFILE; SGE's $PE_HOSTFILE
  --oversubscribe     allow more ranks than the hosts have slots (on this machine alone that is always allowed)
  --slurm             use srun instead of mpirun
  --container IMAGE   run ranks inside an Apptainer or Singularity image, started by the host's launcher; the image needs hvdtrain
                      and an MPI that fits the host's
  --inside            with --container: use the mpirun of the image instead, on one host
  --bind numa|gpu|DIR numa, gpu: each rank runs on cores of its own (comm.bind); DIR: a further folder that a container sees
  --env NAME          a further variable for ranks on other hosts; PATH, OMP_*, HOROVOD_*, NCCL_*, *SEED and such are always sent
  --logs DIR          what each rank of a script or program prints, on its host: DIR/rank-0.log, DIR/rank-1.log, ...
  --plain             the lines of a script or program as they are; without it each begins with its rank: [3] loss 0.1
  --dry-run           print the command line and exit
  --mpi NAME          with --dry-run: the command line for another machine, with openmpi, mpich, intel, srun, flux, pals or lsf (jsrun);
                      needs -np or hosts. srun gets --mpi=pmix, as Open MPI needs it; MPICH and Intel MPI need --mpi=pmi2. With --container
                      the ranks run in an image there, by apptainer
hvdtrain launch --elastic [--min 2] [--max 8] [-H n1:4,n2:4 | --hostfile FILE | --hosts-from PROGRAM] -- run=DIR [key=value ...]
hvdtrain launch --elastic ... -- script.py [run=DIR] [arguments]
  --elastic           start the job again from its newest checkpoint where a host or a rank is lost, on the hosts that are left; on more
                      where hosts come. docs/clusters.md. A script that trains in run=DIR is followed there; of another one the
                      exit code counts, and its hosts are never changed while it runs
  --min 2, --max 8    the fewest and the most ranks; default: 1, and all slots
  --hosts-from PROGRAM  a program that prints a host in each line, as n1:4; it is run again every few seconds, as --hostfile is read again
  --patience 10m      how long to wait for --min; then it ends with exit code 84
  --every 5           seconds between two looks at the offered hosts
  --answer 20         seconds after which a host where mpirun cannot start `echo` counts as lost; less where others
                      answer in less than a fifth of that"""  # noqa: E501
# each has a value
_NEED_ELASTIC = ("--min", "--max", "--hosts-from", "--patience", "--every", "--answer")
_COMMAND_LINE = "command line of launch"
_PORT_ELSEWHERE = 29500  # torchrun's default, if it is impossible to look for a free port


def launch(arguments: Sequence[str]) -> int:
    """Runs `launch`; returns the exit code of the launcher. Raises UserError."""
    separator = arguments.index("--") if "--" in arguments else len(arguments)
    own_arguments = arguments[:separator]
    job = arguments[separator + 1 :]
    if {"-h", "--help"} & set(own_arguments) or not arguments:
        print(USAGE)
        return DONE
    options = _parse(own_arguments)
    program = read_program(
        job, [option for action in _parser()._actions for option in action.option_strings]
    )
    if program.is_job and (options.logs or options.plain):
        option = "--logs" if options.logs else "--plain"
        fix = "without it: rank 0 prints for all ranks, and the folder run=DIR records the job"
        raise UserError(f"{option} is for scripts and programs", _COMMAND_LINE, fix)
    if options.elastic:
        return _elastic(options, program)
    for option in _NEED_ELASTIC:
        if getattr(options, option.removeprefix("--").replace("-", "_")) is not None:
            fix = "launch --elastic ... -- run=DIR ..."
            raise UserError(f"{option} needs --elastic", _COMMAND_LINE, fix)
    command = compose(options, program, os.environ)
    if not options.dry_run:
        print(shlex.join(command), file=sys.stderr, flush=True)
        if options.slurm:  # srun sends the environment to all ranks
            os.environ.setdefault(SECRET, new_secret())
        return LauncherRun(command, is_job=program.is_job).run()
    print(shlex.join(command))
    return DONE


def _elastic(options: argparse.Namespace, program: Program) -> int:
    """Starts the supervisor of an elastic job, with functions that compose a command line and find
    this machine's mpirun."""

    def command(start: argparse.Namespace) -> list[str]:
        return compose(start, program, os.environ)

    def find() -> MpiLauncher:
        container = _container_prefix(options)
        return find_launcher(
            mpi_library_version([*container, "python3"] if container else [sys.executable])
        )

    of_hosts = (options.hosts, options.hostfile, options.hosts_from)
    named = any(value is not None for value in of_hosts)
    allocation = None if named else _allocation(options, os.environ)
    ranks = _ranks(options, (), None, os.environ)
    return launch_elastic(options, program, command, find, ranks, allocation)


def compose(options: argparse.Namespace, program: Program, environ: Mapping[str, str]) -> list[str]:
    """Builds the command line for the options on this machine; `program`: what each rank runs.
    Raises UserError."""
    if options.mpi is not None:
        return _for_another_machine(options, program)
    if options.container is None:
        check_exists(program)
    current = placement(environ)
    if current.size > 1:
        what = (
            f"this is already rank {current.rank} of {current.size}, started by {current.launcher}"
        )
        raise UserError(
            what, _COMMAND_LINE, "one launcher only: hvdtrain under it, or launch without it"
        )
    hosts = _hosts(options)
    allocation = None if hosts else _allocation(options, environ)
    may_use_other_hosts = bool(hosts) or allocation is not None
    ranks = _ranks(options, hosts, allocation, environ)
    shares = ranks_per_host(hosts or (allocation.with_room_for(ranks) if allocation else ()), ranks)
    if (
        allocation is not None and not allocation.ranks
    ):  # otherwise mpirun and srun know the hosts of their SLURM job
        hosts = allocation.with_room_for(ranks)
    container = _container_prefix(options)
    python = [*container, "python3"] if container else [sys.executable]
    on_this_machine_only = not may_use_other_hosts and not options.slurm
    request = LaunchRequest(
        launcher="",
        ranks=ranks,
        program=_command_of(
            program, python, options, shares, None if "MASTER_PORT" in environ else free_port()
        ),
        hosts=hosts,
        forwarded=forwarded_variables(environ, options.env) if may_use_other_hosts else (),
        as_root=os.geteuid() == 0,
        ranks_bind=options.cores not in (None, "none"),
        oversubscribe=options.oversubscribe or (on_this_machine_only and ranks > available_cores()),
        fault_tolerant=value_of(program.words, "guard.lost")
        in ("shrink", "restart"),  # then the launcher must not end the other ranks
    )
    if options.slurm:
        return _with_srun(request, mpi_library_version(python), environ)
    if options.inside:
        return [*container, *_with_mpirun_of_image(request, container, options, program)]
    launcher = find_launcher(mpi_library_version(python))
    return mpirun_command(launcher.kind, replace(request, launcher=launcher.path))


def _command_of(
    program: Program,
    python: Sequence[str],
    options: argparse.Namespace,
    shares: Sequence[Host],
    port: int | None,
) -> tuple[str, ...]:
    """Builds the command line of a rank. shares: the ranks of each host, if hosts are known; port:
    where torch.distributed may meet."""
    hosts = ",".join(f"{host.name}:{host.slots}" for host in shares) if len(shares) > 1 else None
    return rank_command(
        program,
        python,
        plain=options.plain,
        logs=options.logs,
        hosts=hosts,
        port=port,
        bind=options.cores,
    )


def _for_another_machine(options: argparse.Namespace, program: Program) -> list[str]:
    """Builds the command line for --mpi. Raises UserError if an option asks for something of this
    machine."""
    if options.mpi not in MPIS:
        raise UserError(
            f"--mpi {short(options.mpi)} is not known", _COMMAND_LINE, nearest(options.mpi, MPIS)
        )
    if not options.dry_run:
        fix = (
            f"launch --mpi {options.mpi} --dry-run ...; without --mpi, launch takes the MPI of "
            "this machine"
        )
        raise UserError(
            "--mpi is for another machine: its command line is printed, not run", _COMMAND_LINE, fix
        )
    of_here = [option for option in ("inside", "slurm") if getattr(options, option)]
    if of_here:
        raise UserError(
            f"--{of_here[0]} inspects this machine, but --mpi is for another one",
            _COMMAND_LINE,
            "one of them",
        )
    hosts = _hosts(options)
    if options.ranks is None and not hosts:
        raise UserError(
            "the number of ranks is missing",
            _COMMAND_LINE,
            f"-np, as in launch -np 8 --mpi {options.mpi} --dry-run; or -H n1:4,n2:4",
        )
    python = ["python"]
    if options.container is not None:  # apptainer mounts the current folder itself
        binds = [word for folder in options.bind for word in ("--bind", folder)]
        python = ["apptainer", "exec", *binds, options.container, "python3"]
    ranks = _ranks(options, hosts, None, {})
    command = _command_of(program, python, options, ranks_per_host(hosts, ranks), _PORT_ELSEWHERE)
    return command_for(
        options.mpi,
        ranks,
        hosts,
        command,
        options.env,
        options.oversubscribe,
        ranks_bind=options.cores not in (None, "none"),
    )


def _with_srun(
    request: LaunchRequest, library_version: str, environ: Mapping[str, str]
) -> list[str]:
    srun = shutil.which("srun")
    if srun is None:
        fix = "run it on a SLURM cluster's login node or inside a job; elsewhere without --slurm"
        raise UserError("no srun found", "--slurm, PATH", fix)
    pmi = select_pmi(output_of([srun, "--mpi=list"]), identify_mpi(library_version))
    cores = environ.get("SLURM_CPUS_PER_TASK", "")
    return srun_command(
        replace(request, launcher=srun), pmi, int(cores) if cores.isdecimal() else None
    )


def _with_mpirun_of_image(
    request: LaunchRequest, container: Sequence[str], options: argparse.Namespace, program: Program
) -> list[str]:
    """Builds the command line inside the container, on one host."""
    kind = identify_mpi(output_of([*container, "mpirun", "--version"]))
    if kind is None:
        fix = (
            "an image with a known mpirun on its PATH; or without --inside, with the host's mpirun"
        )
        raise UserError(
            "the container has no mpirun that hvdtrain knows",
            f"--inside, {short(options.container)}",
            fix,
        )
    inside = replace(
        request,
        launcher="mpirun",
        program=_command_of(program, ["python3"], options, (), free_port()),
        hosts=(),
        forwarded=(),
        oversubscribe=request.ranks > available_cores(),
    )
    return mpirun_command(kind, inside)


def _container_prefix(options: argparse.Namespace) -> list[str]:
    """Returns the arguments before a program that runs in the container; none without
    --container."""
    if options.container is None:
        if options.inside or options.bind:
            option = "--inside" if options.inside else "--bind"
            fix = "--container IMAGE"
            if options.bind:
                fix += (
                    f"; for the cores of ranks --bind {' or '.join(BINDS)}, not {options.bind[0]}"
                )
            raise UserError(f"{option} needs --container", _COMMAND_LINE, fix)
        return []
    if options.inside and (options.hosts or options.hostfile or options.slurm):
        what = (
            "the mpirun of the image starts ranks on one host only: it cannot leave the container"
        )
        raise UserError(
            what,
            "--inside with -H, --hostfile or --slurm",
            "without --inside: the host's launcher starts ranks in containers",
        )
    runtime = shutil.which("apptainer") or shutil.which("singularity")
    if runtime is None:
        raise UserError(
            "neither apptainer nor singularity found",
            "--container, PATH",
            "load the site's module, or install apptainer",
        )
    image = expand(options.container, "--container").absolute()
    if not image.exists():
        fix = (
            "the path of a .sif file or of an unpacked image; fetch one first: apptainer pull "
            "image.sif docker://..."
        )
        raise UserError(f"there is no image {image}", "--container", fix)
    folders = [os.getcwd(), *(str(expand(folder, "--bind").absolute()) for folder in options.bind)]
    return container_command(runtime, str(image), folders, HERE.nvidia() > 0, ())


def _hosts(options: argparse.Namespace) -> tuple[Host, ...]:
    """Returns the hosts of -H or --hostfile; empty without them."""
    if options.hosts and options.hostfile:
        raise UserError("-H and --hostfile both name hosts", _COMMAND_LINE, "one of them")
    if options.hosts is not None:
        return read_hosts(options.hosts)
    if options.hostfile is None:
        return ()
    try:
        return read_hostfile(
            read_text(expand(options.hostfile, "--hostfile")).splitlines(), options.hostfile
        )
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"cannot read the hosts: {error}",
            "--hostfile",
            "a text file with a host in each line: n1 slots=4",
        ) from None


def _allocation(options: argparse.Namespace, environ: Mapping[str, str]) -> Allocation | None:
    """Returns the hosts of the batch job of this process, with a slot for each GPU if the job was
    submitted without ranks.

    Raises UserError if they cannot be read and there is no -np.
    """
    if options.ranks is not None and "FLUX_URI" in environ:
        return None
    try:
        allocation = find_allocation(environ)
    except UserError as error:
        if options.ranks is None:
            raise
        placed = "srun places" if options.slurm else "this machine alone gets"
        print(f"note: {error.what}; {placed} the ranks of -np", file=sys.stderr, flush=True)
        return None
    if allocation is None:
        return None
    if options.inside and len(allocation.hosts) > 1 and options.ranks is None:
        what = (
            f"the mpirun of the image starts ranks on one host only, and this {allocation.system} "
            f"job has {len(allocation.hosts)}"
        )
        raise UserError(
            what,
            "--inside",
            "without --inside: the host's launcher starts ranks in containers; or -np 4, for this "
            "host",
        )
    gpus = HERE.visible_nvidia(environ)
    if gpus and not allocation.ranks and (allocation.system == "SLURM" or allocation.slots == 1):
        return allocation._replace(
            hosts=tuple(host._replace(slots=gpus) for host in allocation.hosts)
        )
    return allocation


def _ranks(
    options: argparse.Namespace,
    hosts: Sequence[Host],
    allocation: Allocation | None,
    environ: Mapping[str, str],
) -> int:
    """Returns -np, or its default as in USAGE. Raises UserError if it is more than the hosts have
    slots."""
    if options.ranks is None and allocation is not None:
        return allocation.ranks or allocation.slots
    if allocation is not None and len(allocation.hosts) > 1 and not options.inside:
        hosts = allocation.hosts
    slots = sum(host.slots for host in hosts)
    if options.ranks is None:
        return slots or HERE.visible_nvidia(environ) or 1
    if not re.fullmatch("[1-9][0-9]{0,6}", options.ranks):
        raise UserError(
            f"-np {short(options.ranks)} is not a number of ranks",
            _COMMAND_LINE,
            "1 or more, as in -np 8",
        )
    ranks = int(options.ranks)
    if hosts and ranks > slots and not options.oversubscribe:
        given = ",".join(f"{host.name}:{host.slots}" for host in hosts)
        # in proportion, rounded up
        enough = ",".join(f"{host.name}:{-(-ranks * host.slots // slots)}" for host in hosts)
        fix = f"-np {slots}; or more slots, as in -H {short(enough)}; or --oversubscribe"
        raise UserError(
            f"{ranks} ranks, but the hosts have {slots} slot{'s' if slots > 1 else ''}",
            f"-np {ranks}, hosts {short(given)}",
            fix,
        )
    return ranks


def _parser() -> CommandParser:
    parser = CommandParser("launch")
    parser.add_argument("-np", "-n", dest="ranks")
    parser.add_argument("-H", "--hosts", dest="hosts")
    for option in ("--hostfile", "--container", "--mpi", "--logs"):
        parser.add_argument(option)
    for option in ("--env", "--bind"):
        parser.add_argument(option, action="append", default=[])
    for option in ("--oversubscribe", "--slurm", "--inside", "--dry-run", "--plain"):
        parser.add_argument(option, action="store_true")
    parser.add_argument("--elastic", action="store_true")
    for option in _NEED_ELASTIC:
        parser.add_argument(option)
    return parser


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parses the options of launch; raises UserError for an unknown one."""
    parser = _parser()
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        belongs_to_job = "=" in unknown[0] or not unknown[0].startswith("-")
        fix = (
            f"arguments of the job come after --: launch ... -- {short(unknown[0])}"
            if belongs_to_job
            else nearest(unknown[0], parser.names())
        )
        raise UserError(f"unknown argument '{short(unknown[0])}'", _COMMAND_LINE, fix)
    options.cores, options.bind = _read_binds(options.bind)
    return options


def _read_binds(values: Sequence[str]) -> tuple[str | None, list[str]]:
    """Splits the values of --bind: what cores ranks are bound to, None without such a value, and
    the folders of --container."""
    cores = list(dict.fromkeys(value for value in values if value in BINDS))
    if len(cores) > 1:
        raise UserError(f"--bind {cores[0]} and --bind {cores[1]}", _COMMAND_LINE, "one of them")
    folders = [value for value in values if value not in BINDS]
    return (cores[0] if cores else None), folders
