"""The events and their fields as docs/events.md lists them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from ranks import ROOT


def documented() -> dict[str, dict[str, bool]]:
    """kind -> field -> whether it is always there, as docs/events.md says: a heading for each kind,
    an item for each field."""
    kinds: dict[str, dict[str, bool]] = {}
    events = (
        (ROOT / "docs" / "events.md")
        .read_text()
        .partition("\n## The events\n")[2]
        .partition("\n## ")[0]
    )
    for kind, text in re.findall(
        r"^### (\w+)\n(.*?)(?=^### |\Z)", events, re.MULTILINE | re.DOTALL
    ):
        kinds[kind] = {
            name: not optional
            for optional, name in re.findall(r"^- (\*?)`(\w+)`", text, re.MULTILINE)
        }
    kinds["stop"] = kinds["end"]
    return kinds


def check_documented(emitted: Iterable[dict[str, Any]]) -> set[str]:
    kinds = documented()
    seen = set()
    for event in emitted:
        fields = kinds[event["kind"]]
        names = event.keys() - {"time", "kind", "step"}
        assert names <= fields.keys(), (
            f"{event['kind']} has {names - fields.keys()}, which docs/events.md lacks"
        )
        missing = {name for name, always in fields.items() if always} - names
        assert not missing, f"{event['kind']} lacks {missing}"
        seen.add(event["kind"])
    return seen
