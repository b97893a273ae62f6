"""Where the ranks of one job meet without MPI: an address and a port that each rank knows from its launcher's variables."""

from __future__ import annotations

import contextlib
import fcntl
import re
import socket
import struct
import zlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hvdtrain.comm.placement import Placement
from hvdtrain.errors import UserError

PORTS = range(20000, 32000)  # below those that Linux gives to outgoing connections
LOOPBACK = "127.0.0.1"
_SIOCGIFADDR = 0x8915  # of <linux/sockios.h>: the IPv4 address of an interface
_BY_HAND = "comm.address=HOST:PORT, with a host of rank 0 that the other hosts reach"


class Rendezvous(NamedTuple):
    """Rank 0 listens there, unless the launcher does so for it."""

    host: str  # of rank 0, as the other hosts call it
    port: int
    peer: str = ""  # another host of the job, "" where none is known: it leads to the network, where rank 0's host has a loopback name
    hosted: bool = False  # by the launcher
    job: str = "hvdtrain"  # before each key: a launcher that starts a job anew keeps the old job's


def rendezvous(place: Placement, environ: Mapping[str, str], address: str | None) -> Rendezvous | None:
    """Where the user, or else the launcher, says. None where only MPI can tell: under mpirun and mpiexec."""
    if address is not None:
        return _by_address(address, place, environ)
    if place.launcher == "torchrun":
        return _by_torchrun(environ)
    if place.launcher == "srun":
        return _by_srun(environ)
    if place.launcher == "horovodrun":
        what = "horovodrun tells its processes nothing that the torchdist engine could meet by"
        raise UserError(what, "comm.engine=torchdist", f"comm.engine=horovod; or mpirun, srun or torchrun; or {_BY_HAND}")
    return None


def parse_address(text: str, where: str = "comm.address") -> tuple[str, int]:
    """ "n1:29500" -> ("n1", 29500); "[fe80::1]:29500" too. Raises UserError for anything else; `where` says where the text is from."""
    host, _, port = text.rpartition(":")
    if not (host and port.isdecimal() and 0 < int(port) < 65536):
        raise UserError(f"{text!r} is not HOST:PORT", where, "comm.address=n1:29500")
    return host.removeprefix("[").removesuffix("]"), int(port)


def hosts_of(nodes: str) -> list[str]:
    """SLURM's list of nodes: "n[1-2,07-08],gpu3" -> ["n1", "n2", "n07", "n08", "gpu3"]."""
    hosts: list[str] = []
    for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", nodes):
        names = [""]
        for piece in re.findall(r"\[[^\]]*\]|[^\[]+", part):
            names = [name + text for name in names for text in _range_of(piece)]
        hosts += names
    return hosts


def _range_of(piece: str) -> list[str]:
    """ "[1-2,07]" -> ["1", "2", "07"]; anything else is itself."""
    if not piece.startswith("["):
        return [piece]
    texts: list[str] = []
    for span in piece[1:-1].split(","):
        first, _, last = span.partition("-")
        texts += [f"{number:0{len(first)}}" for number in range(int(first), int(last or first) + 1)]
    return texts


def _by_address(address: str, place: Placement, environ: Mapping[str, str]) -> Rendezvous:
    host, port = parse_address(address)
    peers = [] if place.local_size == place.size else _nodes(environ)
    return Rendezvous(host, port, next((peer for peer in peers if peer != host), ""))


def _by_torchrun(environ: Mapping[str, str]) -> Rendezvous:
    if missing := [key for key in ("MASTER_ADDR", "MASTER_PORT") if key not in environ]:
        raise UserError(f"torchrun did not set {' and '.join(missing)}", "the environment", f"torchrun itself, or {_BY_HAND}")
    host, port = parse_address(f"{environ['MASTER_ADDR']}:{environ['MASTER_PORT']}")
    job = f"hvdtrain/{environ.get('TORCHELASTIC_RUN_ID', '')}/{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    return Rendezvous(host, port, hosted=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True", job=job)


def _by_srun(environ: Mapping[str, str]) -> Rendezvous:
    """Rank 0 is on the step's first node. The port follows from the job and its step, so that each finds it without asking."""
    nodes = _nodes(environ)
    if not nodes:
        raise UserError("srun did not set SLURM_STEP_NODELIST", "the environment", _BY_HAND)
    step = "/".join(environ.get(key, "0") for key in ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"))
    port = PORTS[zlib.crc32(step.encode()) % len(PORTS)]
    return Rendezvous(nodes[0], port, nodes[-1] if len(nodes) > 1 else "", job=f"hvdtrain/{step}")


def _nodes(environ: Mapping[str, str]) -> list[str]:
    return hosts_of(environ.get("SLURM_STEP_NODELIST", environ.get("SLURM_JOB_NODELIST", "")))


def address_towards(peer: str) -> str | None:
    """This host's IPv4 address on the network that leads to a peer; nothing is sent. None where its name has no such address."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((peer, 9))
        return str(probe.getsockname()[0])
    return None


def local_address(meet: Rendezvous, one_host: bool) -> str | None:
    """This host's IPv4 address on the network to rank 0's host; on that host, whose own name may be a loopback one, to a peer."""
    found = address_towards(meet.host)
    if one_host or (found and not found.startswith("127.")):
        return found
    found = address_towards(meet.peer) if meet.peer else None
    return None if found is None or found.startswith("127.") else found


def host_to_connect(meet: Rendezvous, one_host: bool) -> str:
    """Where the ranks of this host reach rank 0: by its name, but on its own host where that is a loopback one by the network's address."""
    found = address_towards(meet.host)
    at_home = found is not None and found.startswith("127.") and not one_host and not meet.hosted
    return (local_address(meet, one_host) if at_home else None) or meet.host


def listening_address(hosts: Sequence[str], mine: str) -> str:
    """Where rank 0 on host `mine` listens for ranks on these hosts: loopback where there is no other."""
    others = [host for host in hosts if host != mine]
    found = address_towards(others[0]) if others else LOOPBACK
    if found is None or (others and found.startswith("127.")):
        what = f"{mine} does not find the network to {others[0]}: {'its name has no address' if found is None else f'it is {found}'}"
        raise UserError(what, "comm.engine=torchdist", _BY_HAND)
    return found


def interface_of(address: str) -> str | None:
    """The network interface of this host that has an IPv4 address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has none
                found = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(found[20:24]) == address:
                    return name
    return None


def listen(meet: Rendezvous, one_host: bool) -> socket.socket:
    """The listening socket of rank 0, on one address only; port 0 is any that is free."""
    address = local_address(meet, one_host) or address_towards(meet.host) or meet.host
    if address.startswith("127.") and not one_host:
        what = f"{meet.host} is {address} on its own host, where other hosts do not reach it"
        raise UserError(what, f"rank 0 on {socket.gethostname()}", f"{_BY_HAND}: its address, as in 10.0.0.1:{meet.port}")
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, meet.port))
        listener.listen(4096)
    except OSError as error:
        listener.close()
        where = f"rank 0 on {socket.gethostname()}, {address}:{meet.port}"
        raise UserError(f"the ranks cannot meet there: {error.strerror or error}", where, _BY_HAND) from None
    return listener
