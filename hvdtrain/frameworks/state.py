"""The names in Learner.state(): whether a state fits a model, and the names of its arrays in the framework's own state dict."""

from __future__ import annotations

from collections.abc import Iterable

from hvdtrain.core.arrays import Arrays
from hvdtrain.errors import UserError


def plain_names(names: Iterable[str]) -> dict[str, str]:
    """As Learner.state_dict_names(), of a framework whose users know the same names without "p." and "b."."""
    return {name[2:]: name for name in names if name.startswith(("p.", "b."))}


def check_fit(model: Arrays, state: Arrays) -> None:
    """Raises UserError where `state` lacks an array of the model, has one more, or has one in another shape."""
    where = "state of the model"
    fix = "give the model and options that the checkpoint was made with: they are in its run folder's config.yaml"
    if differing := sorted(model.keys() ^ state.keys()):
        side = "the state lacks" if differing[0] in model else "the model lacks"
        more = f" and {len(differing) - 1} more" if len(differing) > 1 else ""
        raise UserError(f"{side} {differing[0]}{more}", where, fix)
    for name, array in model.items():
        if array.shape != state[name].shape:
            raise UserError(f"{name} has shape {state[name].shape}, the model has {array.shape}", where, fix)
