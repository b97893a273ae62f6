"""The exceptions of Horovod's API, by its names; each says what, where and how to fix it."""

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
    """A library has another version than Horovod was built with. Never raised here, where nothing
    is built; a script may catch it."""

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
    """An op that a collective does not support. Also a HorovodInternalError, as in Horovod, where
    it comes from a round."""


class Mismatch(UserError, HorovodInternalError):
    """Ranks called a collective of one name differently; raised on every rank of the process
    set."""


class Missing(UserError, HorovodInternalError):
    """A rank has ended, or waits for something else, so that a collective will never be made."""

    code = LOST


class Stalled(UserError, HorovodInternalError):
    """A rank did not reach a collective in time."""

    code = STALLED
