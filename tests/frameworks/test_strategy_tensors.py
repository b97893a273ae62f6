"""Tensors that a strategy adds to a checkpoint: equal on all ranks, or of each rank, whose sum
another number of ranks divides."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hvdtrain.config.read import configure
from hvdtrain.core.arrays import ArrayInFile, Piece
from hvdtrain.errors import UserError
from hvdtrain.frameworks.torch.state import check_strategy
from hvdtrain.frameworks.torch.strategy import StrategyTensor
from hvdtrain.training.checkpoint.resume import misfit_of
from hvdtrain.training.start import bytes_of_ranks

OF_THREE = np.array([[1.0, 2.0], [10.0, 20.0], [100.0, 200.0]])


def in_file(array: np.ndarray) -> ArrayInFile:
    flat = array.reshape(-1)
    return ArrayInFile(
        array.shape,
        array.dtype,
        lambda ranges: np.concatenate([flat[start:stop] for start, stop in ranges]),
    )


@pytest.mark.parametrize("read", [np.asarray, in_file])
@pytest.mark.parametrize(
    ("rank", "ranks", "expected"),
    [(0, 3, [1, 2]), (2, 3, [100, 200]), (1, 2, [55.5, 111]), (0, 1, [111, 222])],
)
def test_a_rank_takes_its_own_or_an_equal_share_of_the_sum(
    read: type, rank: int, ranks: int, expected: list[float]
) -> None:
    own = StrategyTensor(torch.zeros(2, dtype=torch.float64), ranks, rank)
    assert own.shape == (ranks, 2) and own.fits(OF_THREE.shape)
    own.load(read(OF_THREE))
    assert own.tensor.tolist() == expected


def test_an_equal_tensor_is_loaded_as_it_is() -> None:
    own = StrategyTensor(torch.zeros(3, 2, dtype=torch.float64))
    assert own.shape == (3, 2) and own.fits((3, 2)) and not own.fits((2, 3))
    own.load(OF_THREE)
    assert own.tensor.tolist() == OF_THREE.tolist()


@pytest.mark.parametrize(
    ("state", "is_partial", "what"),
    [
        ({}, True, ""),
        ({}, False, "the state lacks s.w@residual"),
        ({"s.w@residual": (5, 2), "p.w": (2,)}, False, ""),
        ({"s.w@residual": (5, 3)}, False, "s.w@residual has shape (5, 3), the model has (4, 2)"),
        ({"s.w@residual": (5, 2), "s.w@q": (2,)}, False, "the model lacks s.w@q"),
        ({"s.w@residual": (2,)}, True, "s.w@residual has shape (2,), the model has (4, 2)"),
    ],
)
def test_a_state_has_all_of_them(
    state: dict[str, tuple[int, ...]], is_partial: bool, what: str
) -> None:
    own = {"s.w@residual": StrategyTensor(torch.zeros(2), 4, 0)}
    if not what:
        check_strategy(own, state, is_partial)
        return
    with pytest.raises(UserError) as caught:
        check_strategy(own, state, is_partial)
    assert caught.value.what == what


def test_tensors_of_another_strategy_are_not_taken_for_optimizer_state() -> None:
    """Which a class of torch.optim would load, whatever its name; it has names with a colon."""
    state = {"s.w@residual": (5, 2), "s.w.exp_avg": (2,), "s.w.group.initial_lr:float": ()}
    with pytest.raises(UserError) as caught:
        check_strategy({}, state, is_partial=False)
    assert caught.value.what == "the model lacks s.w@residual"


def test_a_checkpoint_of_other_ranks_fits_and_may_be_larger() -> None:
    zero = np.zeros((4, 2))
    weight = Piece("p.w", (2,), 0, 2, zero.dtype, lambda: zero[0], is_whole=True)
    residual = Piece("s.w@residual", (4, 2), 0, 2, zero.dtype, lambda: zero[0], is_whole=False)
    job = [weight, residual._replace(is_of_ranks=True)]
    config = configure(None, [])
    assert misfit_of(config, job, {"p.w": (2,), "s.w@residual": (1000, 2)}) == ""
    wrong = {"p.w": (2,), "s.w@residual": (1000, 3)}
    assert misfit_of(config, job, wrong) == (
        "s.w@residual has shape (1000, 3), the model has (4, 2)"
    )
    assert bytes_of_ranks(job) >= 1000 * 16 and bytes_of_ranks([weight]) == 0
