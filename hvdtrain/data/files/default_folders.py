"""Where data and caches lie where the user names no folder."""

from __future__ import annotations

import os
from pathlib import Path

from hvdtrain.config.read import expand


def cache_root() -> Path:
    """$XDG_CACHE_HOME/hvdtrain, or ~/.cache/hvdtrain."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():  # unset; or relative, which the standard says to ignore
        base = expand("~/.cache", "$XDG_CACHE_HOME")
    return base / "hvdtrain"


def data_root(root: Path | None) -> Path:
    """The user's data.root, or `data` in the cache. Raises UserError where ~user is unknown."""
    return cache_root() / "data" if root is None else expand(root, "data.root")
