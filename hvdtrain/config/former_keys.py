"""Keys of former versions in the configuration of a run: a run folder is read by later versions too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_UNITS = {"recipe.warmup_epochs": "epochs", "recipe.warmup_steps": "steps", "recipe.warmup_tokens": "tokens"}


def current_keys(recorded: Mapping[str, Any]) -> dict[str, Any]:
    """{key of a former version: {key of this one: its value}}: empty where the former key set nothing.

    recorded: every key of the run's configuration, in which those that set nothing have their defaults.
    """
    renamed: dict[str, Any] = {}
    kind = recorded.get("recipe.warmup")
    if kind in ("gradual", "constant", "none"):
        renamed["recipe.warmup"] = {} if kind == "none" else {"recipe.warmup_kind": kind}
    for key in _UNITS.keys() & recorded.keys():
        length = recorded[key]
        unit = _UNITS[key]
        renamed[key] = {"recipe.warmup": length if unit == "epochs" else f"{length} {unit}"} if length and kind != "none" else {}
    if recorded.get("stop.patience") is not None and "stop.target_for" not in recorded:  # it counted evaluations at stop.target
        renamed["stop.patience"] = {"stop.target_for": recorded["stop.patience"]}
    chain = recorded.get("recipe.chain")
    if isinstance(chain, list) and all(isinstance(piece, dict) for piece in chain):
        pieces = [{"length" if name == "epochs" else name: value for name, value in piece.items()} for piece in chain]
        renamed["recipe.chain"] = {"recipe.chain": pieces}
    return renamed
