"""Starts ranks without MPI or SLURM: `--num-nodes N --node-id I --num-gpus G`, given on each host, starts G processes there (torchdist)."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from types import FrameType
from typing import NamedTuple

from hvdtrain.cli.launch.machine import visible_gpus
from hvdtrain.comm.rendezvous import LOOPBACK, SECRET, new_secret, parse_address, secret_of
from hvdtrain.core.early_signals import EarlySignals
from hvdtrain.core.process import start_child
from hvdtrain.errors import UserError

OPTIONS = ("--num-nodes", "--node-id", "--num-gpus")
FORWARDED_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
GRACE_S = 15.0  # after the first failure of a rank: the other ranks report their errors, then they are killed
POLL_S = 0.05
_EXAMPLE = "hvdtrain --num-nodes 2 --node-id 0 --num-gpus 4 comm.address=n1:29500"


class NodeOptions(NamedTuple):
    """The options of this command, as given on this host."""

    num_nodes: int
    node_id: int
    processes: int  # of each node: --num-gpus

    def environments(self, address: str) -> list[dict[str, str]]:
        """Variables for each process of this node, under torchrun's names; `address`: host:port of rank 0."""
        host, port = parse_address(address)
        common = {
            "WORLD_SIZE": str(self.num_nodes * self.processes),
            "LOCAL_WORLD_SIZE": str(self.processes),
            "MASTER_ADDR": host,
            "MASTER_PORT": str(port),
        }
        first_rank = self.node_id * self.processes
        return [{**common, "RANK": str(first_rank + local), "LOCAL_RANK": str(local)} for local in range(self.processes)]


def spawn(arguments: Sequence[str]) -> int:
    """Starts the ranks of this node and waits for them; returns the exit code of the first that fails, else 0. Raises UserError."""
    options, job = parse_node_options(arguments)
    if "RANK" in os.environ:
        fix = "either a launcher, or these options"
        raise UserError("this process was started by a launcher: RANK is set", ", ".join(OPTIONS), fix)
    environments = options.environments(_address(options, job))
    command = [sys.executable, "-m", "hvdtrain", *job]
    secret = secret_of(os.environ) or (new_secret() if options.num_nodes == 1 else "")  # other hosts would have another one
    children = [start_child(command, {**os.environ, **variables, SECRET: secret}, signal.SIGKILL) for variables in environments]

    def forward(number: int, frame: FrameType | None) -> None:
        for child in children:
            child.send_signal(number)  # does nothing where the child has ended

    for number in FORWARDED_SIGNALS:
        former = signal.getsignal(number)
        if former is not signal.SIG_IGN:  # the parent process set it so, as nohup does with SIGHUP
            signal.signal(number, forward)
        if isinstance(former, EarlySignals) and former.received == number:
            forward(number, None)
    return _wait(children)


def parse_node_options(arguments: Sequence[str]) -> tuple[NodeOptions, list[str]]:
    """The options of OPTIONS, and the other arguments, which belong to the job. Raises UserError."""
    values = {"--num-nodes": 1, "--node-id": 0, "--num-gpus": max(1, visible_gpus(os.environ))}
    job: list[str] = []
    left = list(arguments)
    while left:
        argument = left.pop(0)
        option, equals, value = argument.partition("=")
        if option not in OPTIONS:
            job.append(argument)
            continue
        if not equals:
            value = left.pop(0) if left else ""
        if not value.isdecimal():
            raise UserError(f"{option} {value!r} is not a whole number", "command line", _EXAMPLE)
        values[option] = int(value)
    options = NodeOptions(values["--num-nodes"], values["--node-id"], values["--num-gpus"])
    if options.num_nodes < 1 or options.processes < 1 or options.node_id >= options.num_nodes:
        what = f"impossible: node {options.node_id} of {options.num_nodes} with {options.processes} processes"
        raise UserError(what, "command line", f"--node-id from 0 to --num-nodes - 1, --num-gpus of at least 1: {_EXAMPLE}")
    return options, job


def _address(options: NodeOptions, job: Sequence[str]) -> str:
    """comm.address of the job's arguments; on a single node without one a free port of this host."""
    addresses = [argument.partition("=")[2] for argument in job if argument.startswith("comm.address=")]
    if addresses:
        return addresses[-1]
    if options.num_nodes > 1:
        what = f"{options.num_nodes} nodes need the address of rank 0"
        raise UserError(what, "comm.address", f"the same on every node: {_EXAMPLE}")
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return f"{LOOPBACK}:{probe.getsockname()[1]}"


def _wait(children: Sequence[subprocess.Popen[bytes]]) -> int:
    """The exit code of the first child that fails, 128 + signal where a signal ended it. The others are killed after GRACE_S."""
    failure = 0
    failed_s = 0.0
    while any(child.poll() is None for child in children):
        if not failure:
            failure = _first_failure(children)
            failed_s = time.monotonic()
        if failure and time.monotonic() - failed_s > GRACE_S:
            for child in children:
                child.kill()
        time.sleep(POLL_S)
    failure = failure or _first_failure(children)
    return failure if failure >= 0 else 128 - failure


def _first_failure(children: Sequence[subprocess.Popen[bytes]]) -> int:
    """0 while all run or have succeeded."""
    return next((child.returncode for child in children if child.returncode), 0)
