"""An optimizer that a script has constructed, as the rest of the package knows a user's class: with the Construction of each group."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from hvdtrain.errors import UserError
from hvdtrain.frameworks.torch.optim.user_optimizer import OWN_KEYS, Construction, numbers, signature_of

WHERE = "ctx.prepare()"


def take_optimizer(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Gives each parameter group what a checkpoint and shard.stage need to know. Raises UserError where the two do not belong together."""
    if not isinstance(model, torch.nn.Module) or not isinstance(optimizer, torch.optim.Optimizer):
        what = f"a {type(model).__name__} and a {type(optimizer).__name__}, not a torch.nn.Module and a torch.optim.Optimizer"
        raise UserError(what, WHERE, "model, optimizer = ctx.prepare(model, optimizer)")
    if any(float(state.get("step", 1)) > 0 for state in optimizer.state.values()):  # Adagrad's constructor makes one of step 0
        fix = "prepare() first; ctx.resume() brings the state of a checkpoint"
        raise UserError("the optimizer has made steps already, or loaded a state: ranks would begin with different ones", WHERE, fix)
    if "step" in vars(optimizer):  # torch's schedulers put a function of their own there
        fix = "model, optimizer = ctx.prepare(model, optimizer), then the scheduler of that optimizer, then ctx.resume()"
        raise UserError("a scheduler has this optimizer already, and would not follow the one that prepare() returns", WHERE, fix)
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        what = f"{type(optimizer).__name__} computes the loss several times in a step, and gradients are exchanged once for each batch"
        raise UserError(what, WHERE, "an optimizer whose step() needs no closure, as SGD or AdamW")
    _check_parameters(model, optimizer)
    signature = signature_of(type(optimizer))
    known = signature.parameters if signature else {}
    arguments = {key: value for key, value in optimizer.defaults.items() if key in known}
    for group in optimizer.param_groups:
        initial = numbers({key: value for key, value in group.items() if key != "params"})
        group |= {"excluded": False, "follow": (), "construction": Construction(type(optimizer), arguments, (), initial)}


def without_own_keys(state: dict[str, Any]) -> dict[str, Any]:
    """A state_dict() of the optimizer as its class would give it."""
    groups = [{key: value for key, value in group.items() if key == "params" or key not in OWN_KEYS} for group in state["param_groups"]]
    return {**state, "param_groups": groups}


def _check_parameters(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    of_model = {p: name for name, p in model.named_parameters()}
    updated = {p for group in optimizer.param_groups for p in group["params"]}
    if not updated <= of_model.keys():
        shapes = ", ".join(str(tuple(p.shape)) for p in updated - of_model.keys())
        what = f"the optimizer updates parameters that are not the model's, of shape {shapes}"
        raise UserError(what, WHERE, "one module that has all parameters; the optimizer is made of its parameters(), after model.to(...)")
    left_out = [name for p, name in of_model.items() if p.requires_grad and p not in updated]
    if left_out:
        more = f" and {len(left_out) - 1} more" if len(left_out) > 1 else ""
        fix = "give it all that is trained, or requires_grad_(False) for what is not"
        raise UserError(f"{left_out[0]}{more} would be trained, and the optimizer does not have it", WHERE, fix)
    if not updated:
        raise UserError("the model has no parameter to train", WHERE, "a model with parameters whose requires_grad is true")
