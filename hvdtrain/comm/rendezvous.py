"""Rendezvous of the ranks of a job without MPI: an address and a port that each rank knows from its
launcher's variables."""

from __future__ import annotations

import contextlib
import fcntl
import random
import re
import resource
import secrets
import socket
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from hvdtrain.comm.launcher_variables import SUBMITIT, TORCH_LAUNCHERS, Placement
from hvdtrain.errors import UserError

PORTS = range(20000, 32000)  # below the ports that Linux uses for outgoing connections
LOOPBACK = "127.0.0.1"
SECRET = "HVDTRAIN_SECRET"  # the environment variable with the job's secret, the same on all ranks
_SIOCGIFADDR = 0x8915  # from <linux/sockios.h>: gets the IPv4 address of an interface
_FIX_ADDRESS = "comm.address=HOST:PORT, with a host of rank 0 that the other hosts reach"


class Rendezvous(NamedTuple):
    """The address at which rank 0 listens, unless the launcher hosts the store."""

    host: str  # rank 0's host, by the name that other hosts use
    port: int
    # Another host of the job, "" if unknown. If rank 0's host maps its name to loopback, the route
    # to the peer is used.
    peer: str = ""
    hosted: bool = False  # hosted by the launcher
    # prefix of every key: a launcher that restarts a job keeps the keys of the old one
    job: str = "hvdtrain"
    secret: str = ""  # signs data that ranks write to the store and send to each other


def secret_of(environ: Mapping[str, str]) -> str:
    """Returns the job's secret; empty if the launcher gave none: signatures then only detect
    damaged values."""
    return environ.get(SECRET, "")


def new_secret() -> str:
    return secrets.token_hex(16)


# host -> this host's IPv4 address on the network to it; None if its name has no address
Route = Callable[[str], str | None]


def find_rendezvous(
    place: Placement, environ: Mapping[str, str], address: str | None
) -> Rendezvous | None:
    """Finds the address in comm.address, else in the launcher's variables. None under mpirun and
    mpiexec, because MPI distributes the address.

    Raises UserError if the address is not HOST:PORT, or if the launcher's variables contain none.
    On several hosts, a loopback address raises it on every rank.
    """
    if address is not None:
        return _on_one_host_only(_by_address(address, place, environ), place, "comm.address")
    if place.launcher == SUBMITIT.name:
        # it starts all ranks on one host
        return Rendezvous(LOOPBACK, _port(environ.get("SUBMITIT_LOCAL_JOB_ID", "")))
    if place.launcher in TORCH_LAUNCHERS:
        return _on_one_host_only(_by_torchrun(place, environ), place, "MASTER_ADDR")
    if place.launcher == "srun":
        return _by_srun(environ)
    if place.launcher == "horovodrun":
        what = "horovodrun gives its processes no address for a rendezvous of the torchdist engine"
        raise UserError(
            what,
            "comm.engine=torchdist",
            f"comm.engine=horovod; or mpirun, srun or torchrun; or {_FIX_ADDRESS}",
        )
    return None


def _on_one_host_only(rendezvous: Rendezvous, place: Placement, where: str) -> Rendezvous:
    """Returns the rendezvous. Raises UserError for a loopback address in a job on several hosts,
    because only rank 0 would notice, and the others would wait."""
    is_loopback = rendezvous.host in ("localhost", "::1") or re.fullmatch(
        r"127(\.\d{1,3}){3}", rendezvous.host
    )
    if is_loopback and place.local_size < place.size:
        what = (
            f"{rendezvous.host} means a different machine on each host, but only "
            f"{place.local_size} of {place.size} ranks are on this one"
        )
        raise UserError(
            what,
            f"{where}, rank {place.rank} on {socket.gethostname()}",
            f"{_FIX_ADDRESS}: the network's address of rank 0's host",
        )
    return rendezvous


def parse_address(text: str, where: str = "comm.address") -> tuple[str, int]:
    """Parses "n1:29500" to ("n1", 29500), and "[fe80::1]:29500". Raises UserError for anything
    else; where: the source of the text."""
    host, _, port = text.rpartition(":")
    if not (host and port.isdecimal() and 0 < int(port) < 65536):
        raise UserError(f"{text!r} is not HOST:PORT", where, "comm.address=n1:29500")
    return host.removeprefix("[").removesuffix("]"), int(port)


def expand_nodes(nodes: str) -> list[str]:
    """Parses SLURM's list of nodes: "n[1-2,07-08],gpu3" -> ["n1", "n2", "n07", "n08", "gpu3"]."""
    hosts: list[str] = []
    for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", nodes):
        names = [""]
        for piece in re.findall(r"\[[^\]]*\]|[^\[]+", part):
            names = [name + suffix for name in names for suffix in _expand_range(piece)]
        hosts += names
    return hosts


def _expand_range(piece: str) -> list[str]:
    """Expands "[1-2,07]" to ["1", "2", "07"]; returns anything else unchanged."""
    if not piece.startswith("["):
        return [piece]
    numbers: list[str] = []
    for span in piece[1:-1].split(","):
        first, _, last = span.partition("-")
        numbers += [
            f"{number:0{len(first)}}" for number in range(int(first), int(last or first) + 1)
        ]
    return numbers


def _by_address(address: str, place: Placement, environ: Mapping[str, str]) -> Rendezvous:
    host, port = parse_address(address)
    peers = [] if place.local_size == place.size else step_nodes(environ)
    return Rendezvous(host, port, next((peer for peer in peers if peer != host), ""))


def _by_torchrun(place: Placement, environ: Mapping[str, str]) -> Rendezvous:
    if missing := [key for key in ("MASTER_ADDR", "MASTER_PORT") if key not in environ]:
        raise UserError(
            f"{place.launcher} did not set {' and '.join(missing)}",
            "the environment",
            f"start with torchrun itself, or {_FIX_ADDRESS}",
        )
    host, port = parse_address(f"{environ['MASTER_ADDR']}:{environ['MASTER_PORT']}")
    hosted = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    # torchrun's store outlives a restart of the ranks. Rank 0's does not, and a node that joins
    # later counts restarts separately.
    start = environ.get("TORCHELASTIC_RESTART_COUNT", "0") if hosted else ""
    return Rendezvous(
        host, port, hosted=hosted, job=f"hvdtrain/{environ.get('TORCHELASTIC_RUN_ID', '')}/{start}"
    )


def _by_srun(environ: Mapping[str, str]) -> Rendezvous:
    """Returns the address: rank 0 is on the step's first node, and the port is computed from job
    and step, so that each rank knows it."""
    nodes = step_nodes(environ)
    if not nodes:
        raise UserError("srun did not set SLURM_STEP_NODELIST", "the environment", _FIX_ADDRESS)
    step = "/".join(
        environ.get(key, "0") for key in ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    )
    return Rendezvous(
        nodes[0], _port(step), nodes[-1] if len(nodes) > 1 else "", job=f"hvdtrain/{step}"
    )


def _port(job: str) -> int:
    """Returns the port that every rank computes from the job's name."""
    return PORTS[zlib.crc32(job.encode()) % len(PORTS)]


def free_port() -> int:
    """Returns a random port from PORTS that no process on this host listens on. Raises UserError if
    there is none."""
    for port in random.SystemRandom().sample(PORTS, 256):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("", port))
            return port
    raise UserError(
        "no port is free",
        f"{PORTS.start} to {PORTS.stop - 1} on {socket.gethostname()}",
        _FIX_ADDRESS,
    )


def step_nodes(environ: Mapping[str, str]) -> list[str]:
    """Returns the nodes of srun's step, else of SLURM's job; empty elsewhere."""
    return expand_nodes(environ.get("SLURM_STEP_NODELIST", environ.get("SLURM_JOB_NODELIST", "")))


def address_towards(host: str) -> str | None:
    """Returns this host's IPv4 address on the network to another host, without sending anything.
    None if the other's name has no such address."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return str(probe.getsockname()[0])
    return None


def local_address(
    rendezvous: Rendezvous, one_host: bool, route: Route = address_towards
) -> str | None:
    """Returns this host's IPv4 address on the network to rank 0's host; on that host, whose name
    may be a loopback address, to the peer."""
    address = route(rendezvous.host)
    if one_host or (address and not address.startswith("127.")):
        return address
    address = route(rendezvous.peer) if rendezvous.peer else None
    return None if address is None or address.startswith("127.") else address


def host_to_connect(rendezvous: Rendezvous, one_host: bool, route: Route = address_towards) -> str:
    """Returns the address at which this host's ranks reach rank 0: its name, or on rank 0's host
    the network address if the name maps to loopback."""
    address = route(rendezvous.host)
    is_loopback = (
        address is not None
        and address.startswith("127.")
        and not one_host
        and not rendezvous.hosted
    )
    return (local_address(rendezvous, one_host, route) if is_loopback else None) or rendezvous.host


def listening_address(hosts: Sequence[str], rank_0_host: str) -> str:
    """Returns the address on which rank 0 listens for ranks on these hosts; loopback if all are on
    its host. Raises UserError if no network leads there."""
    others = [host for host in hosts if host != rank_0_host]
    address = address_towards(others[0]) if others else LOOPBACK
    if address is None or (others and address.startswith("127.")):
        reason = "its name has no address" if address is None else f"it is {address}"
        raise UserError(
            f"{rank_0_host} does not find the network to {others[0]}: {reason}",
            "comm.engine=torchdist",
            _FIX_ADDRESS,
        )
    return address


def interfaces() -> dict[str, str]:
    """Returns {name: IPv4 address} of this host's network interfaces; interfaces without an address
    are skipped."""
    addresses = dict[str, str]()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an address
                found = fcntl.ioctl(
                    probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15])
                )
                addresses[name] = socket.inet_ntoa(found[20:24])
    return addresses


def interface_of(address: str) -> str | None:
    """Returns the network interface of this host that has an IPv4 address; None if there is
    none."""
    return next((name for name, found in interfaces().items() if found == address), None)


def listen(rendezvous: Rendezvous, one_host: bool, route: Route = address_towards) -> socket.socket:
    """Opens rank 0's listening socket, on one address only; port 0 means any free port.

    Raises UserError if other hosts do not reach the address, or it is in use.
    """
    address = (
        local_address(rendezvous, one_host, route) or route(rendezvous.host) or rendezvous.host
    )
    if address.startswith("127.") and not one_host:
        what = f"{rendezvous.host} is {address} on its own host, which other hosts cannot reach"
        raise UserError(
            what,
            f"rank 0 on {socket.gethostname()}",
            f"{_FIX_ADDRESS}: its address, as in 10.0.0.1:{rendezvous.port}",
        )
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, rendezvous.port))
        listener.listen(4096)
    except OSError as error:
        listener.close()
        where = f"rank 0 on {socket.gethostname()}, {address}:{rendezvous.port}"
        raise UserError(
            f"rank 0 cannot listen for the other ranks: {error.strerror or error}",
            where,
            _FIX_ADDRESS,
        ) from None
    return listener


def files_needed(ranks: int) -> int:
    """Returns the most open files that a process of a job with this many ranks needs. Gloo connects
    every pair, and the store has two connections per rank."""
    return 256 + 8 * ranks


def allow_open_files(ranks: int) -> None:
    """Raises this process's soft limit of open files, often 1,024, up to the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = files_needed(ranks)
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(
            resource.RLIMIT_NOFILE,
            (needed if hard == resource.RLIM_INFINITY else min(needed, hard), hard),
        )
