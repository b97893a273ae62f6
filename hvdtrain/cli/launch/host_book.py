"""Which of the offered hosts answer, and which are left out for a while because they failed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hvdtrain.cli.launch.launcher_commands import Host

MOST_S = 900.0
FORGOTTEN_S = 600.0  # of work without a failure, after which former ones do not count


def left_out_s(failures: int, first_s: float) -> float:
    """How long a host is left out after so many failures: first_s, and twice as long after each further one."""
    return float(min(MOST_S, first_s * 2 ** min(failures - 1, 30)))


@dataclass
class _State:
    answers: bool = False
    failures: int = 0
    until_s: float = 0.0  # left out, by the clock of the caller


class HostBook:
    """Times are those of a monotonic clock, which the caller reads. first_s: as left_out_s()."""

    def __init__(self, first_s: float) -> None:
        self._first_s = first_s
        self._offered: tuple[Host, ...] = ()
        self._states: dict[str, _State] = {}

    @property
    def offered(self) -> tuple[Host, ...]:
        return self._offered

    def offer(self, hosts: Sequence[Host]) -> None:
        """From now on these hosts are offered, and no others. What is known of a host outlives that it is gone for a while."""
        self._offered = tuple(hosts)

    def unknown(self, now_s: float) -> list[str]:
        """Hosts to ask whether they answer: offered, and not left out."""
        found = ((host.name, self._states.setdefault(host.name, _State())) for host in self._offered)
        return [name for name, state in found if not state.answers and now_s >= state.until_s]

    def usable(self) -> tuple[Host, ...]:
        """The hosts that are offered and answer."""
        return tuple(host for host in self._offered if self._states.get(host.name, _State()).answers)

    def answered(self, name: str) -> None:
        self._states.setdefault(name, _State()).answers = True

    def doubt(self, names: Iterable[str]) -> None:
        """A job on these hosts failed: each has to answer again, at once."""
        for name in names:
            state = self._states.setdefault(name, _State())
            state.answers, state.until_s = False, 0.0

    def failed(self, name: str, now_s: float) -> float:
        """The host does not answer; returns for how many seconds it is left out."""
        state = self._states.setdefault(name, _State())
        state.failures += 1
        pause_s = left_out_s(state.failures, self._first_s)
        state.answers, state.until_s = False, now_s + pause_s
        return pause_s

    def worked(self, names: Iterable[str], seconds: float) -> None:
        """A start on these hosts lasted so long."""
        if seconds >= FORGOTTEN_S:
            for name in names:
                self._states[name].failures = 0

    def left_out(self, now_s: float) -> list[str]:
        return [host.name for host in self._offered if self._states.get(host.name, _State()).until_s > now_s]
