"""The names in Learner.state(): whether a state fits a model, and the names of its arrays in the framework's own state dict."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from hvdtrain.comm.communicator import Communicator
from hvdtrain.core.arrays import Arrays, Piece
from hvdtrain.errors import UserError


def plain_names(names: Iterable[str]) -> dict[str, str]:
    """Names in a state dict, see Learner.state_dict_names(), of a framework whose users know the same names without "p." and "b."."""
    return {name[2:]: name for name in names if name.startswith(("p.", "b."))}


def gather(communicator: Communicator, pieces: Iterable[Piece], *, is_kept: bool = True) -> Arrays:
    """A copy of every array, one after the other; `communicator` is of the ranks that have their parts. A collective where they have.

    is_kept: false on a rank that only gives its parts: it returns nothing, and has one array at a time.
    """
    pieces = list(pieces)
    in_parts = any(not piece.is_whole for piece in pieces)
    of_ranks = communicator.allgather_object([list(piece.runs()) for piece in pieces]) if in_parts else []

    def copy_of(i: int, piece: Piece) -> np.ndarray:
        if piece.is_whole:
            return piece.read().copy()
        return gather_one(communicator, piece.name, piece.shape, piece.read(), [of_rank[i] for of_rank in of_ranks])

    if is_kept:
        return {piece.name: copy_of(i, piece) for i, piece in enumerate(pieces)}
    for i, piece in enumerate(pieces):
        if not piece.is_whole:
            copy_of(i, piece)
    return {}


def gather_one(
    communicator: Communicator, name: str, shape: tuple[int, ...], own: np.ndarray, runs: Sequence[Sequence[tuple[int, int]]]
) -> np.ndarray:
    """The whole of an array of which this rank has the elements `own`; runs[rank]: where those of a rank lie. A collective."""
    parts, done = communicator.allgather(own, f"gather.{name}"), 0
    whole = np.empty(shape, parts.dtype).reshape(-1)
    for first, behind in itertools.chain.from_iterable(runs):
        whole[first:behind] = parts[done : done + behind - first]
        done += behind - first
    return whole.reshape(shape)


Shapes = Mapping[str, tuple[int, ...]]


def check_fit(model: Shapes, state: Shapes, is_partial: bool = False) -> None:
    """Raises UserError where `state` lacks an array of the model (a partial one may), has one more, or has one in another shape."""
    where = "state of the model"
    fix = "give the model and options that the checkpoint was made with: they are in its run folder's config.yaml"
    if differing := sorted(state.keys() - model.keys() if is_partial else model.keys() ^ state.keys()):
        side = "the state lacks" if differing[0] in model else "the model lacks"
        more = f" and {len(differing) - 1} more" if len(differing) > 1 else ""
        raise UserError(f"{side} {differing[0]}{more}", where, fix)
    for name, shape in state.items():
        if model[name] != shape:
            raise UserError(f"{name} has shape {shape}, the model has {model[name]}", where, fix)
