"""Several hosts on one machine: network and UTS namespaces with their own names, addresses and
network."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
from cluster_packages import need
from ranks import HANG_S, Job, Result, mpirun_path

from hvdtrain.training.replicas.software import variables

# each set of hosts has a bridge in a separate namespace, so two sets may have the same addresses
NET = "10.77.0"
GONE_S = 300.0  # for processes that were killed to be gone
BACK_S = 300.0  # for a host to get answers once it is connected again

_EXEC = "import os, sys; os.execvp(sys.argv[1], sys.argv[1:])"
# Nothing listens at port 9: a refusal is an answer.
_ANSWERED = """
import errno, socket, sys, time
end_s = time.monotonic() + float(sys.argv[-1])
for address in sys.argv[1:-1]:
    while True:
        with socket.socket() as wire:
            wire.settimeout(1)
            if wire.connect_ex((address, 9)) == errno.ECONNREFUSED:
                break
        if time.monotonic() > end_s:
            sys.exit(f"{address} does not answer")
        time.sleep(0.05)
"""
# Called like ssh: [options] HOST COMMAND...; like ssh it does not pass on its environment.
_AGENT = """#!/bin/sh
while [ $# -gt 0 ]; do case "$1" in -[Filop]) shift 2 ;; -*) shift ;; *) break ;; esac; done
host=$1
shift
exec nsenter --uts="{folder}/$host.uts" ip netns exec "{prefix}$host" env -i HOME="$HOME" PATH={path} sh -c "$*"
"""  # noqa: E501
_SSHD = """ListenAddress {address}
HostKey {folder}/hostkey
AuthorizedKeysFile {folder}/id.pub
PidFile {folder}/{name}.pid
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
StrictModes no
"""
_SSH = """#!/bin/sh
exec ssh -F none -i {folder}/id -o IdentitiesOnly=yes -o UserKnownHostsFile={folder}/known_hosts -o StrictHostKeyChecking=yes \\
  -o BatchMode=yes -o LogLevel=ERROR "$@"
"""  # noqa: E501


class Hosts:
    """A context manager: hosts n1, n2, ... at 10.77.0.1, ...; leaving it ends every process on
    them, and takes them away.

    They share the files and the process numbers of this machine. With `ssh` each runs a real sshd,
    and mpirun starts ranks through it.
    """

    def __init__(self, count: int, *, ssh: bool = False) -> None:
        self.names = [f"n{number}" for number in range(1, count + 1)]
        self._ssh = ssh
        self._stack = ExitStack()

    def __enter__(self) -> Hosts:
        need("iproute2", *["openssh-server", "openssh-client"] * self._ssh)
        if os.geteuid():
            pytest.skip("only root can make network namespaces")
        with self._stack:
            self.folder = Path(
                self._stack.enter_context(tempfile.TemporaryDirectory(prefix="hvdtrain-hosts-"))
            )
            self._prefix = (
                f"{self.folder.name}-"  # prefix of namespaces: differs between concurrent test runs
            )
            self._stack.enter_context(self._namespace("switch"))
            self._ip("switch", "link add br0 type bridge")
            self._ip("switch", "link set br0 up")
            for number, name in enumerate(self.names, start=1):
                self._stack.enter_context(self._host(name, f"{NET}.{number}"))
            self.agent = self._script(
                "agent", _AGENT.format(folder=self.folder, prefix=self._prefix, path=os.defpath)
            )
            if self._ssh:
                self._start_sshd()
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def on(self, name: str, argv: Sequence[str]) -> list[str]:
        """The command line that runs argv on a host."""
        return [
            "nsenter",
            f"--uts={self.folder}/{name}.uts",
            "ip",
            "netns",
            "exec",
            self._prefix + name,
            *argv,
        ]

    def start(
        self,
        name: str,
        argv: Sequence[str],
        *,
        timeout_s: float = HANG_S,
        env: Mapping[str, str] | None = None,
    ) -> Job:
        """argv in the background on a host."""
        there = {
            "PRTE_MCA_plm_ssh_agent": str(self.agent),
            "PRTE_MCA_rmaps_default_mapping_policy": "slot",
            **(env or {}),
        }
        return Job(0, ["-c", _EXEC, *self.on(name, argv)], timeout_s=timeout_s, env=there)

    def mpirun(
        self,
        where: str,
        argv: Sequence[str],
        *,
        timeout_s: float = HANG_S,
        env: Mapping[str, str] | None = None,
    ) -> Job:
        """Runs `mpirun -H WHERE python ARGV` on n1, with a rank for each slot of WHERE:
        "n1:4,n2:4"."""
        size = sum(int(part.partition(":")[2]) for part in where.split(","))
        # a variable that changes results must be equal on all ranks
        sent = (
            "PYTHONPATH",
            "OMP_NUM_THREADS",
            *variables(os.environ),
        )
        words = ["-np", str(size), "-H", where, *(word for name in sent for word in ("-x", name))]
        return self.start(
            "n1",
            [mpirun_path() or "mpirun", *words, sys.executable, *argv],
            timeout_s=timeout_s,
            env=env,
        )

    def run(
        self,
        name: str,
        argv: Sequence[str],
        *,
        timeout_s: float = HANG_S,
        env: Mapping[str, str] | None = None,
    ) -> Result:
        """argv on a host, to its end."""
        with self.start(name, argv, timeout_s=timeout_s, env=env) as job:
            return job.wait()

    def pids(self, *names: str) -> set[int]:
        """The processes on these hosts, or on all; but not sshd's."""
        found = {
            pid
            for name in names or self.names
            for pid in map(int, _run("ip", "netns", "pids", self._prefix + name).split())
        }
        return {pid for pid in found if not _comm(pid).startswith("sshd")}

    def cut(self, name: str) -> None:
        """Nothing comes from or gets to the host any more, as when its cable is pulled."""
        self._ip("switch", f"link set {name} down")

    def heal(self, name: str) -> None:
        """The host is back once it gets an answer: an address that it asked for in vain is "no
        route to host" for up to a second more."""
        self._ip("switch", f"link set {name} up")
        _run(
            *self.on(
                name,
                [
                    sys.executable,
                    "-c",
                    _ANSWERED,
                    *(f"{NET}.{number}" for number in range(1, len(self.names) + 1)),
                    str(BACK_S),
                ],
            )
        )

    def slow(self, rate: str | None) -> None:
        """What each host sends, limited to a rate of tc: "100mbit"; None: unlimited."""
        for name in self.names:
            tc = self.on(name, ["tc", "qdisc"])
            # there may be none
            subprocess.run([*tc, "del", "dev", "eth0", "root"], capture_output=True, check=False)
            if rate:
                _run(
                    *tc,
                    "add",
                    "dev",
                    "eth0",
                    "root",
                    "tbf",
                    "rate",
                    rate,
                    "burst",
                    "64kb",
                    "latency",
                    "50ms",
                )

    def clear(self) -> None:
        """Ends every process on every host."""
        for name in self.names:
            self._clear(name)

    @contextmanager
    def _host(self, name: str, address: str) -> Iterator[None]:
        etc = Path(f"/etc/netns/{self._prefix}{name}")
        uts = self.folder / f"{name}.uts"
        with self._namespace(name):
            self._ip(
                "switch", f"link add {name} type veth peer name eth0 netns {self._prefix}{name}"
            )
            self._ip("switch", f"link set {name} master br0 up")
            for words in (f"addr add {address}/24 dev eth0", "link set eth0 up", "link set lo up"):
                self._ip(name, words)
            etc.mkdir(parents=True)  # `ip netns exec` mounts its files over /etc
            uts.touch()
            try:
                known = [
                    f"{NET}.{number} {other}" for number, other in enumerate(self.names, start=1)
                ]
                (etc / "hosts").write_text("\n".join(["127.0.0.1 localhost", *known, ""]))
                _run("unshare", f"--uts={uts}", "hostname", name)
                yield
            finally:
                self._clear(name)
                subprocess.run(["umount", uts], capture_output=True, check=False)
                (etc / "hosts").unlink(missing_ok=True)
                etc.rmdir()

    @contextmanager
    def _namespace(self, name: str) -> Iterator[None]:
        added = subprocess.run(
            ["ip", "netns", "add", self._prefix + name], capture_output=True, text=True, check=False
        )
        if added.returncode:
            pytest.skip(f"no network namespaces here: {added.stderr.strip()}")
        try:
            yield
        finally:
            _run("ip", "netns", "del", self._prefix + name)

    def _clear(self, name: str) -> None:
        """Ends every process on a host."""
        end_s = time.monotonic() + GONE_S
        while pids := _run("ip", "netns", "pids", self._prefix + name).split():
            assert time.monotonic() < end_s, f"processes on {name} do not end: {pids}"
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            time.sleep(0.02)

    def _start_sshd(self) -> None:
        Path("/run/sshd").mkdir(exist_ok=True)
        for key in ("id", "hostkey"):
            _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / key))
        host_key = (self.folder / "hostkey.pub").read_text()
        (self.folder / "known_hosts").write_text(
            "".join(f"{name} {host_key}" for name in self.names)
        )
        for number, name in enumerate(self.names, start=1):
            settings = self.folder / f"{name}.sshd"
            settings.write_text(
                _SSHD.format(folder=self.folder, name=name, address=f"{NET}.{number}")
            )
            _run(*self.on(name, ["/usr/sbin/sshd", "-f", str(settings)]))
        self.agent = self._script("ssh", _SSH.format(folder=self.folder))

    def _script(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.write_text(text)
        path.chmod(0o755)
        return path

    def _ip(self, namespace: str, words: str) -> None:
        _run("ip", "-n", self._prefix + namespace, *shlex.split(words))


def _run(*argv: str) -> str:
    ran = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert not ran.returncode, f"{shlex.join(argv)}: {ran.stderr}"
    return ran.stdout


def _comm(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""
