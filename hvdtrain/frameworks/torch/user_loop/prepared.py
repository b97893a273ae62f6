"""The model and optimizer that ctx.prepare() returns: they handle dtypes and stages, and step with
the gradient of all ranks."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch

from hvdtrain.comm.communicator import Communicator
from hvdtrain.config.schema import Config
from hvdtrain.config.sections.section import DEFAULT
from hvdtrain.errors import UserError
from hvdtrain.frameworks.torch.forward import in_type
from hvdtrain.frameworks.torch.optim.user_optimizer import OWN_KEYS, take
from hvdtrain.frameworks.torch.precision import LossScale, Precision, Scale, pick_precision
from hvdtrain.frameworks.torch.user_loop.words import WORDS

WHERE = "ctx.prepare()"
# overflows in a row: the scale has dropped from 2^16 to 2^-14, so the cause is not overflow
MOST = 30


class PreparedOptimizer(torch.optim.Optimizer):
    """A torch.optim.Optimizer for schedulers and for the script. It shares param_groups, state and
    defaults with the optimizer inside.

    step() clips the gradients (optim.clip_norm, optim.clip_value), updates, and clears them.
    GradScaler.step() calls it in any case.
    """

    # GradScaler sets grad_scale and found_inf, and step() leaves out the update on all ranks
    _step_supports_amp_scaling = True

    def __init__(
        self, inner: torch.optim.Optimizer, update: Callable[[AmpScaling | None], None]
    ) -> None:
        """update: what step() does. The constructor of Optimizer is not called: `inner` has its
        attributes."""
        self.__dict__.update(inner.__dict__)
        self._inner = inner
        self._update = update

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """closure: forward and ctx.backward(loss), as in torch. It is called once, and its result
        is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        given = vars(self)
        with torch.no_grad():
            self._update(
                AmpScaling(given["found_inf"], given["grad_scale"])
                if "found_inf" in given
                else None
            )
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Does nothing: step() clears the gradients, and before it nothing is to be cleared."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise UserError(
            "a parameter group was added after ctx.prepare()",
            "optimizer.add_param_group()",
            "add all groups before ctx.prepare()",
        )

    def state_dict(self) -> dict[str, Any]:
        """Returns the inner optimizer's state; with shard.stage only this rank's part.
        ctx.checkpoint() saves the whole state."""
        return without_own_keys(self._inner.state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        fix = (
            "state = ctx.resume(), after prepare(): it restores weights, optimizer state and the "
            "position in the data"
        )
        raise UserError(
            "a prepared optimizer gets its state from ctx.resume()",
            "optimizer.load_state_dict()",
            fix,
        )

    def __getattr__(self, name: str) -> Any:
        """Returns train() and eval() if the inner optimizer has them."""
        if name in ("train", "eval"):
            return getattr(self.__dict__["_inner"], name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __repr__(self) -> str:
        return f"prepared {self._inner!r}"


def take_optimizer(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Adds to each parameter group what a checkpoint and shard.stage need. Raises UserError if
    model and optimizer do not belong together."""
    if not isinstance(model, torch.nn.Module) or not isinstance(optimizer, torch.optim.Optimizer):
        what = (
            f"a {type(model).__name__} and a {type(optimizer).__name__}, not a torch.nn.Module "
            "and a torch.optim.Optimizer"
        )
        is_optax = callable(getattr(optimizer, "init", None)) and callable(
            getattr(optimizer, "update", None)
        )
        fix = (
            "hvdtrain.init('framework=jax', ...) takes parameters and a transformation of optax"
            if is_optax
            else WORDS.prepare
        )
        raise UserError(what, WHERE, fix)
    if any(
        float(state.get("step", 1)) > 0 for state in optimizer.state.values()
    ):  # Adagrad's constructor already creates a state for step 0
        fix = "prepare() first; ctx.resume() restores the state of a checkpoint"
        raise UserError(
            "the optimizer has already made steps or loaded a state, so ranks could start with "
            "different ones",
            WHERE,
            fix,
        )
    if "step" in vars(optimizer):  # torch's schedulers put their own function there
        fix = (
            "model, optimizer = ctx.prepare(model, optimizer), then the scheduler of that "
            "optimizer, then ctx.resume()"
        )
        raise UserError(
            "a scheduler already uses this optimizer, and would not affect the one that "
            "prepare() returns",
            WHERE,
            fix,
        )
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        what = (
            f"{type(optimizer).__name__} computes the loss several times in a step, but gradients "
            "are reduced only once per batch"
        )
        raise UserError(
            what, WHERE, "an optimizer whose step() needs no closure, such as SGD or AdamW"
        )
    _check_parameters(model, optimizer)
    take(optimizer, ())


def without_own_keys(state: dict[str, Any]) -> dict[str, Any]:
    """Returns a state_dict() of the optimizer without the keys that hvdtrain added."""
    groups = [
        {key: value for key, value in group.items() if key == "params" or key not in OWN_KEYS}
        for group in state["param_groups"]
    ]
    return {**state, "param_groups": groups}


def _check_parameters(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    of_model = {p: name for name, p in model.named_parameters()}
    updated = {p for group in optimizer.param_groups for p in group["params"]}
    if not updated <= of_model.keys():
        shapes = ", ".join(str(tuple(p.shape)) for p in updated - of_model.keys())
        what = f"the optimizer updates parameters that are not the model's, of shape {shapes}"
        raise UserError(
            what,
            WHERE,
            "one module with all parameters; create the optimizer from its parameters(), after "
            "model.to(...)",
        )
    left_out = [name for p, name in of_model.items() if p.requires_grad and p not in updated]
    if left_out:
        more = f" and {len(left_out) - 1} more" if len(left_out) > 1 else ""
        fix = "add it to the optimizer, or call requires_grad_(False) on it"
        raise UserError(
            f"{left_out[0]}{more} requires a gradient, but the optimizer does not have it",
            WHERE,
            fix,
        )
    if not updated:
        raise UserError(
            "the model has no parameter to train",
            WHERE,
            "a model with parameters whose requires_grad is true",
        )


def precision_of(
    config: Config, model: torch.nn.Module, device: torch.device, communicator: Communicator
) -> Precision:
    """Returns the precision of speed.precision; if the script does not set it, the model is not
    changed. Every rank calls it."""
    if precision_is_asked(config):
        return pick_precision(config, device, communicator)
    dtype = next(p.dtype for p in model.parameters() if p.requires_grad)
    return Precision(dtype, None, str(dtype).removeprefix("torch."))


def precision_is_asked(config: Config) -> bool:
    """Whether the script sets speed.precision."""
    return config.origin("speed.precision") != DEFAULT


def give_type(model: torch.nn.Module, optimizer: torch.optim.Optimizer, dtype: torch.dtype) -> None:
    """Casts weights, buffers and the optimizer's initial state to this dtype. Parameters remain the
    same objects."""
    model.to(dtype)
    for state in optimizer.state.values():
        state |= {
            key: t.to(dtype)
            for key, t in state.items()
            if key != "step" and torch.is_tensor(t) and t.is_floating_point()
        }


def as_sample(x: torch.Tensor, device: torch.device, dtype: torch.dtype | None) -> torch.Tensor:
    """Converts a tensor of the script to the dtype and device of samples. dtype: of floating-point
    samples; None: as they are."""
    x = x.detach().to(device)
    return x.to(dtype) if dtype is not None and x.is_floating_point() else x


def compute_in(model: torch.nn.Module, precision: Precision, device: torch.device) -> None:
    """Makes each call of the model run under autocast, with outputs in the dtype of the weights."""
    if precision.layers is None:
        return
    calls = _Autocast(precision, device)
    model.register_forward_pre_hook(calls.enter)
    model.register_forward_hook(calls.leave, always_call=True)


class _Autocast:
    """The hooks of compute_in(). They are copied and saved with the model."""

    def __init__(self, precision: Precision, device: torch.device) -> None:
        self._precision = precision
        self._device = device
        self._entered: list[AbstractContextManager[Any]] = []

    def enter(self, *_: Any) -> None:
        self._entered.append(self._precision.autocast(self._device))
        self._entered[-1].__enter__()

    def leave(self, module: torch.nn.Module, inputs: Any, outputs: Any) -> Any:
        self._entered.pop().__exit__(None, None, None)
        # None: the call has failed
        return None if outputs is None else in_type(outputs, self._precision.weights)


class AmpScaling(NamedTuple):
    """The arguments of GradScaler.step() for an optimizer with _step_supports_amp_scaling."""

    found_inf: torch.Tensor  # above 0 if a gradient is not finite
    scale: torch.Tensor | None  # the gradients' scale; None after GradScaler.unscale_()


class GivenScale(Scale):
    """The scale of a script's GradScaler. All ranks have the same gradients, so their scalers find
    the same overflows."""

    def __init__(self, is_sharded: bool) -> None:
        """is_sharded: this rank has only parts of the gradients."""
        super().__init__()
        self.scaled: AmpScaling | None = None  # this step's
        self._is_sharded = is_sharded
        self._in_a_row = 0  # consecutive overflows; each one halves the scale

    def unscale_(self, parameters: list[torch.nn.Parameter]) -> None:
        """Raises UserError if this rank has only parts of the gradients."""
        if self.scaled is None:
            return
        if self._is_sharded:
            what = (
                "a GradScaler only sees this rank's part of the gradients, so ranks would scale "
                "by different numbers"
            )
            raise UserError(
                what,
                "scaler.step(optimizer)",
                "shard.stage=0; or bfloat16, which needs no scaler: torch.autocast(..., "
                "torch.bfloat16)",
            )
        if self.scaled.scale is not None:
            torch._foreach_mul_(
                [p.grad for p in parameters if p.grad is not None], self.scaled.scale.reciprocal()
            )

    def update(self, bad: torch.Tensor) -> bool:
        """Scale.update(). The host waits for the device, in each step with a scaler."""
        if self.scaled is None:
            return False
        self._in_a_row = self._in_a_row + 1 if bool(bad | (self.scaled.found_inf > 0)) else 0
        return 0 < self._in_a_row <= MOST


class ScaleOfLoss(LossScale):
    """The loss scale of speed.precision=fp16 in a custom loop. The loop may read p.grad before the
    step, so the scale is divided out right after the backward pass.
    """

    def divide_out(self, parameters: list[torch.nn.Parameter]) -> None:
        """LossScale.unscale_(), called right after the backward pass."""
        super().unscale_(parameters)

    def unscale_(self, parameters: list[torch.nn.Parameter]) -> None:
        """Does nothing: divide_out() was already called."""
