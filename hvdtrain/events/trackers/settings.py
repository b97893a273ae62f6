"""The configuration as trackers keep it, without what looks like a secret; and whether a tracker is installed."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from collections.abc import Iterator, Mapping
from typing import Any

from hvdtrain.config.schema import OPEN_SECTIONS, Config
from hvdtrain.errors import UserError
from hvdtrain.events import redaction


def demand(package: str, extra: str) -> None:
    """A UserError where a package is not installed; nothing is imported."""
    if importlib.util.find_spec(package) is None:
        raise UserError(f"{package} is not installed", "log.trackers", f"pip install 'hvdtrain[{extra}]'")


def settings(config: Config) -> dict[str, Any]:
    """The configuration as config.yaml has it: {"epochs": 10, "batch": {"size": 64, ...}, ...}."""
    tree = dataclasses.asdict(config)
    for section in OPEN_SECTIONS:
        tree[section] |= tree[section].pop("options")
    shown: dict[str, Any] = redaction.shown(tree)
    return shown


def texts(config: Config) -> dict[str, str]:
    """The same, flat: {"epochs": "10", "batch.size": "64", ...}."""
    return dict(_flat("", settings(config)))


def _flat(prefix: str, tree: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(f"{prefix}{key}.", value)
        else:
            yield f"{prefix}{key}", value if isinstance(value, str) else json.dumps(value, default=str)
