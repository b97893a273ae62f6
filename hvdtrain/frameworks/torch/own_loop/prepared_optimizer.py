"""What ctx.prepare() gives in the place of a script's optimizer: its step() takes the gradient of all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hvdtrain.errors import UserError
from hvdtrain.frameworks.torch.own_loop.given_optimizer import without_own_keys
from hvdtrain.frameworks.torch.own_loop.grad_scaler import Scaled


class PreparedOptimizer(torch.optim.Optimizer):
    """A torch.optim.Optimizer for schedulers and for the script: param_groups, state and defaults are those of the optimizer inside.

    step() clips the gradients (optim.clip_norm, optim.clip_value), updates, and clears them. GradScaler.step() calls it in any case.
    """

    _step_supports_amp_scaling = True  # GradScaler sets grad_scale and found_inf, and step() leaves out the update on all ranks

    def __init__(self, inner: torch.optim.Optimizer, update: Callable[[Scaled | None], None]) -> None:
        """update: what step() does. The constructor of Optimizer is not called: its attributes are those of `inner`."""
        self.__dict__.update(inner.__dict__)
        self._inner, self._update = inner, update

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """closure: forward and ctx.backward(loss), as torch has it; it is called once, and what it returns is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        given = vars(self)
        with torch.no_grad():
            self._update(Scaled(given["found_inf"], given["grad_scale"]) if "found_inf" in given else None)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Does nothing: step() clears the gradients, and before it nothing is to be cleared."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise UserError("a parameter group after ctx.prepare()", "optimizer.add_param_group()", "give the optimizer all groups before it")

    def state_dict(self) -> dict[str, Any]:
        """With shard.stage this rank's part; ctx.checkpoint() saves the whole."""
        return without_own_keys(self._inner.state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        fix = "state = ctx.resume(), after prepare(): weights, optimizer state and the place in the samples"
        raise UserError("the state of an optimizer that is prepared comes from a checkpoint", "optimizer.load_state_dict()", fix)

    def __getattr__(self, name: str) -> Any:
        """train() and eval() of an optimizer that has them."""
        if name in ("train", "eval"):
            return getattr(self.__dict__["_inner"], name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __repr__(self) -> str:
        return f"prepared {self._inner!r}"
