"""The exceptions of Horovod's API, with its names. Each reports what is wrong, where, and how to
fix it."""

from __future__ import annotations

from hvdtrain.errors import LOST, STALLED, UserError


class HorovodInternalError(RuntimeError):
    """A collective failed; elastic.run() recovers from this error."""


class HostsUpdatedInterrupt(RuntimeError):
    """Hosts came or went between two steps; raised by a state's commit()."""

    def __init__(self, skip_sync: bool) -> None:
        super().__init__(skip_sync)
        self.skip_sync = skip_sync


class HorovodVersionMismatchError(ImportError):
    """In Horovod, raised if a library's version differs from the build. Never raised here, because
    nothing is built, but a script may catch it."""

    def __init__(self, name: str, version: str, installed_version: str) -> None:
        super().__init__(
            f"{name} has version {version}, and Horovod was built with {installed_version}"
        )
        self.name = name
        self.version = version
        self.installed_version = installed_version


class BadCall(UserError, ValueError):
    """An invalid argument, detected without other ranks."""


class NoSuchReduction(BadCall, HorovodInternalError):
    """Raised for an op that a collective does not support. Also a HorovodInternalError, because in
    Horovod a round raises it."""


class Mismatch(UserError, HorovodInternalError):
    """Ranks called a collective of one name differently; raised on every rank of the process
    set."""


class Missing(UserError, HorovodInternalError):
    """Raised if a collective will never run, because a rank has ended or waits for something
    else."""

    code = LOST


class Stalled(UserError, HorovodInternalError):
    """A rank did not reach a collective in time."""

    code = STALLED
