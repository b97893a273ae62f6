"""Ranks without a launcher: `--num-nodes N --node-id I --num-gpus G`, typed on each host, starts its G processes of torchdist."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import NamedTuple

from hvdtrain.cli.launch.machine import visible_gpus
from hvdtrain.comm.rendezvous import LOOPBACK, parse_address
from hvdtrain.errors import UserError

OPTIONS = ("--num-nodes", "--node-id", "--num-gpus")
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
GRACE_S = 15.0  # for the other ranks of this host to say their own last words
POLL_S = 0.05
_PR_SET_PDEATHSIG = 1  # of <sys/prctl.h>
_EXAMPLE = "python -m hvdtrain --num-nodes 2 --node-id 0 --num-gpus 4 comm.address=n1:29500"


class Nodes(NamedTuple):
    """What was typed on this host."""

    nodes: int
    this: int
    ranks: int  # of each host

    def environments(self, address: str) -> list[dict[str, str]]:
        """What tells each process of this host its place; the names are torchrun's."""
        host, port = parse_address(address)
        common = {"WORLD_SIZE": self.nodes * self.ranks, "LOCAL_WORLD_SIZE": self.ranks, "MASTER_ADDR": host, "MASTER_PORT": port}
        places = [{"RANK": self.this * self.ranks + local, "LOCAL_RANK": local} for local in range(self.ranks)]
        return [{key: str(value) for key, value in (common | place).items()} for place in places]


def start(words: Sequence[str]) -> int:
    """Starts this host's ranks and waits for them; the exit code is that of the first that fails."""
    nodes, rest = take(words)
    if "RANK" in os.environ:
        raise UserError("a launcher has started this process already: it set RANK", ", ".join(OPTIONS), "one of the two")
    environments = nodes.environments(_address(nodes, rest))
    children = [_child([sys.executable, "-m", "hvdtrain", *rest], {**os.environ, **told}) for told in environments]

    def pass_on(number: int, frame: FrameType | None) -> None:
        for child in children:
            child.send_signal(number)  # none to those that have ended

    for number in PASSED_ON:
        signal.signal(number, pass_on)
    return _wait(children)


def take(words: Sequence[str]) -> tuple[Nodes, list[str]]:
    """The nodes, and the other words."""
    values, rest = {"--num-nodes": 1, "--node-id": 0, "--num-gpus": max(1, visible_gpus(os.environ))}, list[str]()
    left = list(words)
    while left:
        option, given, value = left.pop(0).partition("=")
        if option not in OPTIONS:
            rest.append(f"{option}{given}{value}")
            continue
        value = value if given else left.pop(0) if left else ""
        if not value.isdecimal():
            raise UserError(f"{option} {value!r} is not a whole number", "command line", _EXAMPLE)
        values[option] = int(value)
    nodes = Nodes(*(values[option] for option in OPTIONS))
    if not (nodes.nodes > 0 and nodes.ranks > 0 and nodes.this < nodes.nodes):
        what = f"node {nodes.this} of {nodes.nodes} with {nodes.ranks} processes cannot be"
        raise UserError(what, "command line", f"--node-id from 0 to --num-nodes - 1: {_EXAMPLE}")
    return nodes, rest


def _address(nodes: Nodes, words: Sequence[str]) -> str:
    given = [word.partition("=")[2] for word in words if word.startswith("comm.address=")]
    if given:
        return given[-1]
    if nodes.nodes > 1:
        raise UserError(f"{nodes.nodes} nodes need a place to meet", "comm.address", f"the same on every node, in the command: {_EXAMPLE}")
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return f"{LOOPBACK}:{probe.getsockname()[1]}"


def _child(command: Sequence[str], environ: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """It ends with this process, however that ends."""
    libc = ctypes.CDLL(None)  # this process has one thread
    return subprocess.Popen(command, env=environ, preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL))  # noqa: PLW1509


def _wait(children: Sequence[subprocess.Popen[bytes]]) -> int:
    first, failed_s = 0, 0.0
    while any(child.poll() is None for child in children):
        codes = [child.returncode for child in children if child.returncode]
        if codes and not first:
            first, failed_s = codes[0], time.monotonic()
        if first and time.monotonic() - failed_s > GRACE_S:
            for child in children:
                child.kill()
        time.sleep(POLL_S)
    first = first or next((child.returncode for child in children if child.returncode), 0)
    return first if first >= 0 else 128 - first
