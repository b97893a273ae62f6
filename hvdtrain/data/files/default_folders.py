"""Where data and caches lie: the folder that the user names, or the default one."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from hvdtrain.config.read import expand
from hvdtrain.errors import UserError


def cache_root() -> Path:
    """$XDG_CACHE_HOME/hvdtrain, or ~/.cache/hvdtrain."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():  # unset; or relative, which the standard says to ignore
        base = expand("~/.cache", "$XDG_CACHE_HOME")
    return base / "hvdtrain"


def data_root(root: Path | None) -> Path:
    """The user's data.root, or `data` in the cache. Raises UserError where ~user is unknown."""
    return cache_root() / "data" if root is None else expand(root, "data.root")


def check_folder(root: Path, fix: str) -> None:
    """Raises UserError where data.root is not there, or is a file; OSError where it cannot be seen."""
    try:
        is_folder = stat.S_ISDIR(root.stat().st_mode)
    except FileNotFoundError:
        raise UserError(f"{root} does not exist", "data.root", fix) from None
    if not is_folder:
        raise UserError(f"{root} is not a folder", "data.root", fix)
