"""The configuration as trackers store it, with secrets hidden; and the check that a tracker's package is installed."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator, Mapping
from typing import Any

from hvdtrain.config.schema import Config
from hvdtrain.errors import UserError
from hvdtrain.events import redaction


def require_package(package: str, extra: str) -> None:
    """Raises UserError where a package is not installed; imports nothing."""
    if importlib.util.find_spec(package) is None:
        raise UserError(f"{package} is not installed", "log.trackers", f"pip install 'hvdtrain[{extra}]'")


def redacted_config(config: Config) -> dict[str, Any]:
    """The configuration as in config.yaml: {"epochs": 10, "batch": {"size": 64, ...}, ...}."""
    redacted: dict[str, Any] = redaction.redact(config.model_dump())
    return redacted


def flat_config(config: Config) -> dict[str, str]:
    """The configuration with dotted keys, values as JSON: {"epochs": "10", "batch.size": "64", ...}."""
    return dict(_flat("", redacted_config(config)))


def _flat(prefix: str, tree: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(f"{prefix}{key}.", value)
        else:
            yield f"{prefix}{key}", value if isinstance(value, str) else json.dumps(value, default=str)
