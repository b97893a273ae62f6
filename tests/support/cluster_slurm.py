"""A SLURM for tests: munged, slurmctld and a slurmd for each node, with all state in a temporary
folder and nothing in /etc."""

from __future__ import annotations

import os
import re
import secrets
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from cluster_hosts import NET, Hosts
from cluster_packages import need
from ports import free_port
from ranks import HANG_S, ROOT, environment

CPUS = 4  # of each node, whatever the machine has
START_S = 300.0
STOP_S = 60.0
_PMIX = "usr/lib/*/pmix2/lib/libpmix.so.2"

_CONF = """ClusterName=ci
SlurmctldHost={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=20
SlurmctldPort={port}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
TmpFS={folder}/tmp.%n
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SchedulerParameters=bf_interval=2,sched_min_interval=0,batch_sched_delay=0
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=0
KillWait=5
MinJobAge=600
EnforcePartLimits=ALL
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
{nodes}
PartitionName=ci Nodes=n[1-{count}] Default=YES MaxTime=INFINITE State=UP
"""


class Slurm:
    """A context manager: nodes n1, n2, ..., which are these hosts, or two on the loopback address;
    leaving it ends jobs and daemons."""

    def __init__(self, hosts: Hosts | None) -> None:
        self.hosts = hosts
        self._stack = ExitStack()
        self.nodes = hosts.names if hosts else ["n1", "n2"]

    def __enter__(self) -> Slurm:
        need("slurm-wlm", "slurm-client", "munge", "libpmix2")
        if os.geteuid():
            pytest.skip("only root can start these daemons")
        for library in Path("/").glob(
            _PMIX
        ):  # SLURM loads the name that only libpmix-dev would bring
            with suppress(FileExistsError):
                library.with_suffix("").symlink_to(library.name)
        with self._stack:
            self.folder = Path(
                self._stack.enter_context(
                    tempfile.TemporaryDirectory(
                        prefix="hvdtrain-slurm-", ignore_cleanup_errors=True
                    )
                )
            )
            self.folder.chmod(0o755)
            self._stack.callback(self._stop)
            self._start()
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def run(
        self, *argv: str, env: Mapping[str, str] | None = None, timeout_s: float = HANG_S
    ) -> subprocess.CompletedProcess[str]:
        """A client's command on n1, to its end."""
        command = ["timeout", "-k", "5", str(timeout_s), *self._on("n1", argv)]
        there = {**environment(env), "SLURM_CONF": str(self.folder / "slurm.conf")}
        return subprocess.run(
            command,
            env=there,
            cwd=ROOT,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            check=False,
        )

    def must(
        self, *argv: str, env: Mapping[str, str] | None = None, timeout_s: float = HANG_S
    ) -> str:
        """What a client's command says that must not fail."""
        ran = self.run(*argv, env=env, timeout_s=timeout_s)
        assert ran.returncode == 0, (
            f"{argv}: {ran.returncode}\n{ran.stdout[-3000:]}\n{ran.stderr[-3000:]}"
        )
        return ran.stdout.strip()

    def job(self, number: str) -> dict[str, str]:
        """What `scontrol show job` says: JobState, ExitCode, Restarts, ..."""
        return dict(re.findall(r"(\w+)=(\S*)", self.must("scontrol", "show", "job", number)))

    def logs(self) -> str:
        """The last lines of every daemon, for a test that fails."""
        return "\n".join(
            f"{path.name}:\n{path.read_text()[-2000:]}"
            for path in sorted(self.folder.glob("*.log"))
        )

    def _start(self) -> None:
        (self.folder / "munge.key").write_bytes(secrets.token_bytes(128))
        (self.folder / "munge.key").chmod(0o600)
        for name in (
            "state",
            *(f"{kind}.{node}" for kind in ("spool", "tmp") for node in self.nodes),
        ):
            (self.folder / name).mkdir()
        (self.folder / "slurm.conf").write_text(self._conf())
        # else slurmd looks for one by itself
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        files = {
            "key-file": "key",
            "socket": "socket",
            "pid-file": "pid",
            "log-file": "log",
            "seed-file": "seed",
        }
        self._daemon(
            "",
            "munged",
            "--force",
            *(f"--{option}={self.folder}/munge.{name}" for option, name in files.items()),
        )
        self._daemon("n1", "slurmctld", "-c")
        for node in self.nodes:
            self._daemon(node, "slurmd", "-N", node)
        end_s = time.monotonic() + START_S
        while self.run("sinfo", "-h", "-t", "idle", "-o", "%D").stdout.strip() != str(
            len(self.nodes)
        ):
            assert time.monotonic() < end_s, f"no idle nodes: {self.logs()}"
            time.sleep(0.05)

    def _conf(self) -> str:
        here = socket.gethostname().partition(".")[0]
        ports = [free_port() for _ in range(len(self.nodes) + 1)]
        if self.hosts:
            addresses = [f"NodeAddr={NET}.{number}" for number in range(1, len(self.nodes) + 1)]
        else:
            addresses = [f"NodeHostname={here} NodeAddr=127.0.0.1"] * len(self.nodes)
        nodes = [
            f"NodeName={node} {address} Port={port} CPUs={CPUS} RealMemory=4000 State=UNKNOWN"
            for node, address, port in zip(self.nodes, addresses, ports[1:], strict=True)
        ]
        controller = f"n1({NET}.1)" if self.hosts else f"{here}(127.0.0.1)"
        return _CONF.format(
            folder=self.folder,
            controller=controller,
            port=ports[0],
            nodes="\n".join(nodes),
            count=len(nodes),
        )

    def _daemon(self, node: str, *argv: str) -> None:
        """Starts a program that goes to the background by itself."""
        env = {
            **environment(),
            "SLURM_CONF": str(self.folder / "slurm.conf"),
            "PATH": f"{os.environ['PATH']}:/usr/sbin",
        }
        ran = subprocess.run(
            self._on(node, argv),
            env=env,
            capture_output=True,
            text=True,
            check=False,
            timeout=START_S,
        )
        assert ran.returncode == 0, f"{argv}: {ran.stderr}"

    def _on(self, node: str, argv: Sequence[str]) -> list[str]:
        return self.hosts.on(node, argv) if self.hosts and node else list(argv)

    def _stop(self) -> None:
        self.run("scancel", "--full", "--user=root")
        end_s = time.monotonic() + STOP_S
        while self.run("squeue", "-h").stdout.strip() and time.monotonic() < end_s:
            time.sleep(0.1)
        daemons = [
            int(path.read_text()) for path in self.folder.glob("*.pid") if path.read_text().strip()
        ]
        for number in (signal.SIGTERM, signal.SIGKILL):
            for pid in daemons:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
            while any(_alive(pid) for pid in daemons) and time.monotonic() < end_s + STOP_S:
                time.sleep(0.05)
        if self.hosts:
            self.hosts.clear()


def _alive(pid: int) -> bool:
    """A zombie whose parent does not reap it is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
