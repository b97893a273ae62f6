"""The floating-point operations that a model needs for one sample, counted before the first
step."""

from __future__ import annotations

import contextlib
import random
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from hvdtrain.config.schema import Config
from hvdtrain.errors import UserError, first_line
from hvdtrain.frameworks.torch.call import call
from hvdtrain.frameworks.torch.check_outputs import example
from hvdtrain.frameworks.torch.model import checked_model
from hvdtrain.frameworks.torch.private_api import FakeTensorMode, tree_leaves
from hvdtrain.frameworks.torch.step_costs import FlopCounter
from hvdtrain.frameworks.torch.without_numbers import (
    Answered,
    CopiedWithoutNumbers,
    side_effects_undone,
)
from hvdtrain.tasks.task import Task

_SAMPLES = 2


def sample_flops(config: Config, task: Task, *, is_small: bool) -> float:
    """Returns the operations of matrix products, convolutions and attention in the forward and
    backward pass of one sample. A multiply-add counts as two.

    Operations that model.recompute or a fused attention repeats do not count, nor do the loss and
    the optimizer. All outputs count, even if the loss does not read them. The model is in
    evaluation mode, in which a user's model has no side effects, so layers that it calls only in
    training do not count.

    is_small: a copy of the model runs on the CPU, in milliseconds. A large model gets tensors
    without numbers, which load 80 MB of libraries in a second. Raises UserError if the model cannot
    be called.
    """
    plain = config.replace(
        model=config.model.replace(recompute="none"),
        speed=config.speed.replace(compile="none", device="cpu"),
    )
    try:
        with torch.random.fork_rng(devices=[]), _same_draws(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the model repeats its warnings when it trains
            if is_small:
                return _count(checked_model(plain, task), plain, task)
            return _count_without_numbers(plain, task)
    except Exception as error:  # in the user's model
        how = "" if is_small else " without numbers"
        what = f"{config.model.name} cannot be called{how}: {type(error).__name__}: "
        raise UserError(f"{what}{first_line(error)}", config.where("model.name")) from error


@contextlib.contextmanager
def _same_draws() -> Iterator[None]:
    """Restores the generators of Python and NumPy, from which a model may draw: only rank 0 creates
    it again."""
    of_python = random.getstate()
    of_numpy = np.random.get_state()
    try:
        yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)


def _count_without_numbers(config: Config, task: Task) -> float:
    with side_effects_undone(), FakeTensorMode(allow_non_fake_inputs=True):
        with Answered(), CopiedWithoutNumbers():
            model = checked_model(config, task)
        return _count(model, config, task)


class _EagerCounter(FlopCounter):
    """Counts a model's operations outside of torch.compile. Another mode has torch load its
    compiler at the first operation: 800 modules, more than a second."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.count(func, args, kwargs or {})


def _count(model: torch.nn.Module, config: Config, task: Task) -> float:
    dtype = next(p.dtype for p in model.parameters() if p.requires_grad)
    inputs = example(_SAMPLES, config, task, torch.empty(0, dtype=dtype))
    with _EagerCounter(of_model=True) as counter:
        outputs = call(model.eval(), inputs)
        differentiable = [
            x for x in tree_leaves(outputs) if isinstance(x, torch.Tensor) and x.requires_grad
        ]
        torch.stack([x.sum() for x in differentiable]).sum().backward()
    return counter.flops / _SAMPLES
