"""Prevents downloads by a model's code while it is built, unless model.download allows them."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch

from hvdtrain.comm.communicator import Communicator
from hvdtrain.comm.on_all_ranks import on_rank_0
from hvdtrain.config.schema import Config
from hvdtrain.errors import UserError, short

# the configuration of the job whose model is built
_WITHOUT_DOWNLOADS: ContextVar[Config | None] = ContextVar("without_downloads", default=None)
_urlopen = torch.hub.urlopen
# variable of huggingface_hub, which timm and transformers use to download; read at import
_HUB = "HF_HUB_OFFLINE"
# errors that it raises when it is offline
_REFUSED = {"OfflineModeIsEnabled", "LocalEntryNotFoundError"}


def _open_or_refuse(url: Any, *arguments: Any, **options: Any) -> Any:
    """Replaces urlopen() in torch.hub; raises UserError if a job builds its model without
    model.download."""
    config = _WITHOUT_DOWNLOADS.get()
    if config is not None:
        raise _refusal(config, f"downloads {short(getattr(url, 'full_url', url))}")
    return _urlopen(url, *arguments, **options)


def _refusal(config: Config, does: str) -> UserError:
    fix = "model.weights=FILE, and no weights in its own options; or model.download=true"
    return UserError(f"{config.model.name} {does}", config.where("model.name"), fix)


@contextlib.contextmanager
def watched(config: Config) -> Iterator[None]:
    """Within the context, nothing is downloaded through torch.hub or the Hugging Face Hub, unless
    model.download allows it.

    Raises UserError if a library tries. The hub's cache is still read.
    """
    torch.hub.urlopen = _open_or_refuse
    may = config.model.download
    token = _WITHOUT_DOWNLOADS.set(None if may else config)
    try:
        with contextlib.nullcontext() if may else _OFFLINE:
            yield
    except UserError:
        raise
    except Exception as error:
        if not is_download(error, may):
            raise
        if may:
            what = f"{config.model.name} cannot download: {short(str(error))}"
            raise UserError(
                what, config.where("model.name"), "a network, or model.weights=FILE"
            ) from error
        raise _refusal(config, "downloads from the Hugging Face Hub") from error
    finally:
        _WITHOUT_DOWNLOADS.reset(token)


def is_download(error: BaseException, may: bool = False) -> bool:
    """Whether a library failed because it could not download, offline by design or without a
    network."""
    known = {*_REFUSED, "URLError"} if may else _REFUSED  # the last is of torch.hub
    return any(type(cause).__name__ in known for cause in _causes(error))


def download_first(config: Config, communicator: Communicator, build: Callable[[], object]) -> None:
    """Calls build() on rank 0 first, to fill the caches of libraries before the other ranks build
    the same. A collective if model.download is on.

    Raises on every rank the UserError that build() raises.
    """
    if not config.model.download or communicator.size == 1:
        return

    def fill() -> None:
        with torch.random.fork_rng(devices=[]):
            build()

    on_rank_0(communicator, fill)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yields an error and its causes."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


class _Offline:
    """The offline mode of huggingface_hub, from the first thread that enters to the last one that
    leaves."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._variable: str | None = None
        self._in_library: bool | None = None  # before; None: it was not imported

    def __enter__(self) -> None:
        with self._lock:
            self._inside += 1
            if self._inside == 1:
                self._variable = os.environ.get(_HUB)
                os.environ[_HUB] = "1"
                self._in_library = getattr(_constants(), "HF_HUB_OFFLINE", None)
            _set_in_library(True)

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside:
                return
            if self._variable is None:
                del os.environ[_HUB]
            else:
                os.environ[_HUB] = self._variable
            said = (self._variable or os.environ.get("TRANSFORMERS_OFFLINE") or "").upper()
            _set_in_library(
                said in {"1", "ON", "YES", "TRUE"} if self._in_library is None else self._in_library
            )


def _constants() -> Any:
    """Returns the module of huggingface_hub that stores whether it is offline; None if it is not
    imported."""
    return sys.modules.get("huggingface_hub.constants")


def _set_in_library(offline: bool) -> None:
    if (constants := _constants()) is not None:
        constants.HF_HUB_OFFLINE = offline


_OFFLINE = _Offline()
