"""The ranks of this node as children of this process, without MPI or SLURM: `hvdtrain --num-nodes 2
--node-id 0 --num-gpus 4`, by hand on each node."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from types import FrameType
from typing import NamedTuple

from hvdtrain.comm.driver_files import HERE
from hvdtrain.comm.launcher_variables import Placement, torchrun_variables
from hvdtrain.comm.rendezvous import (
    LOOPBACK,
    SECRET,
    free_port,
    new_secret,
    parse_address,
    secret_of,
)
from hvdtrain.core.early_signals import STOPPING, EarlySignals
from hvdtrain.core.process import start_child
from hvdtrain.errors import UserError

OPTIONS = ("--num-nodes", "--node-id", "--num-gpus")
# after the first failure of a rank: the other ranks report their errors, then they are killed
GRACE_S = 15.0
POLL_S = 0.05
_EXAMPLE = "hvdtrain --num-nodes 2 --node-id 0 --num-gpus 4 comm.address=n1:29500"


class NodeOptions(NamedTuple):
    """The options of ranks that are started by hand, as given on this host."""

    num_nodes: int
    node_id: int
    processes: int  # processes per node: --num-gpus

    def environments(self, address: str) -> list[dict[str, str]]:
        """Variables for each process of this node, under torchrun's names; `address`: host:port of
        rank 0."""
        host, port = parse_address(address)
        address_of_rank_0 = {"MASTER_ADDR": host, "MASTER_PORT": str(port)}
        size = self.num_nodes * self.processes
        first_rank = self.node_id * self.processes
        places = [
            Placement(first_rank + local, size, local, self.processes, "torchrun")
            for local in range(self.processes)
        ]
        return [
            torchrun_variables(place, (self.node_id, self.num_nodes)) | address_of_rank_0
            for place in places
        ]


def train_num_nodes(arguments: Sequence[str]) -> int:
    """Starts the ranks of this node (torchdist): `--num-nodes N --node-id I --num-gpus G`, given on
    each host, starts G processes there.

    Waits for them; returns the exit code of the first that fails, else 0. Raises UserError.
    """
    options, job = parse_node_options(arguments)
    if "RANK" in os.environ:
        fix = "use either a launcher or these options"
        raise UserError(
            "this process was started by a launcher: RANK is set", ", ".join(OPTIONS), fix
        )
    environments = options.environments(_address(options, job))
    command = [sys.executable, "-m", "hvdtrain", *job]
    # other hosts would create a different secret
    secret = secret_of(os.environ) or (new_secret() if options.num_nodes == 1 else "")
    children = [
        start_child(command, {**os.environ, **variables, SECRET: secret}, signal.SIGKILL)
        for variables in environments
    ]

    def forward(number: int, frame: FrameType | None) -> None:
        for child in children:
            child.send_signal(number)  # does nothing if the child has ended

    for number in STOPPING:
        former = signal.getsignal(number)
        if former is not signal.SIG_IGN:  # set by the parent process, as nohup does for SIGHUP
            signal.signal(number, forward)
        if isinstance(former, EarlySignals) and former.received == number:
            forward(number, None)
    return _wait(children)


def parse_node_options(arguments: Sequence[str]) -> tuple[NodeOptions, list[str]]:
    """Parses the options of OPTIONS, and the other arguments, which belong to the job. Raises
    UserError."""
    values = {
        "--num-nodes": 1,
        "--node-id": 0,
        "--num-gpus": max(1, HERE.visible_nvidia(os.environ)),
    }
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
        what = (
            f"node {options.node_id} of {options.num_nodes} with {options.processes} processes is "
            "impossible"
        )
        raise UserError(
            what,
            "command line",
            f"--node-id from 0 to --num-nodes - 1, --num-gpus of at least 1: {_EXAMPLE}",
        )
    return options, job


def _address(options: NodeOptions, job: Sequence[str]) -> str:
    """Returns comm.address of the job's arguments; on a single node without one, a free port of
    this host."""
    addresses = [
        argument.partition("=")[2] for argument in job if argument.startswith("comm.address=")
    ]
    if addresses:
        return addresses[-1]
    if options.num_nodes > 1:
        what = f"{options.num_nodes} nodes need the address of rank 0"
        raise UserError(what, "comm.address", f"the same on every node: {_EXAMPLE}")
    return f"{LOOPBACK}:{free_port()}"


def _wait(children: Sequence[subprocess.Popen[bytes]]) -> int:
    """Returns the exit code of the first child that fails, or 128 + signal if a signal ended it.
    The others are killed after GRACE_S."""
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
    """Returns 0 while all run or have succeeded."""
    return next((child.returncode for child in children if child.returncode), 0)
