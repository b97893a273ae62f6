"""Users' classes of torch.optim: their construction from options, and the state that a checkpoint
can store."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from hvdtrain.config.plugins import fix_of_parameters
from hvdtrain.config.schema import Config
from hvdtrain.config.sections.section import DEFAULT
from hvdtrain.core.own_line import own_line
from hvdtrain.errors import UserError

OWN_KEYS = {"params", "excluded", "follow", "construction"}  # added to a user's parameter groups
# bool first, because a bool is an int
KINDS: dict[str, type] = {
    "bool": bool,
    "int": int,
    "float": float,
}
LISTS: dict[str, type] = {"tuple": tuple, "list": list}
# all other options its step() reads from the groups
_IN_CONSTRUCTORS_OF_TORCH = {
    "initial_accumulator_value",
    "fused",
}
FIX = "use the optimizer and options of the checkpoint"


class Construction(NamedTuple):
    """How the optimizer of a parameter group was constructed: the group's entry "construction",
    which hvd.DistributedOptimizer keeps."""

    constructor: Callable[..., Any]
    arguments: dict[str, Any]  # arguments of the constructor, except the groups
    options: tuple[str, ...]  # the names of those arguments that only the constructor sees
    initial: dict[str, Any]  # the group's settings() afterwards
    rate: float = 1.0  # the group's rate, which is multiplied by the recipe's

    @property
    def path(self) -> str:
        """The import path of the class, however the user wrote it."""
        return f"{self.constructor.__module__}.{self.constructor.__qualname__}"


def construct(
    constructor: Callable[..., Any],
    name: str,
    groups: list[dict[str, Any]],
    config: Config,
    where: str,
) -> torch.optim.Optimizer:
    """Constructs the optimizer of a class for groups and options, each group with its Construction.
    Raises UserError with the class's signature."""
    signature = signature_of(constructor)
    if signature is None or not issubclass(constructor, torch.optim.Optimizer):  # type: ignore[arg-type]
        what = f"{name}{signature or '(...)'} is not a subclass of torch.optim.Optimizer"
        fix = (
            "give one, as in optim.name=torch.optim.RMSprop, or a function make(named) of the "
            "named parameters that makes one"
        )
        raise UserError(what, where, f"{fix}; functions of optax are for framework=jax")
    check_closure(constructor, name, where)
    if "lr" in config.optim.options:  # the recipe sets it in each step
        raise UserError(
            "the learning rate of a class of torch.optim is not optim.lr",
            config.where("optim.lr"),
            "did you mean optim.base_lr?",
        )
    construction = Construction(
        constructor, arguments(signature, config), tuple(config.optim.options), {}
    )
    try:
        signature.bind(groups, **construction.arguments)
        optimizer: torch.optim.Optimizer = constructor(groups, **construction.arguments)
    except (
        Exception
    ) as error:  # for an invalid number torch raises ValueError, other classes anything
        message = (
            f"{error}"
            if isinstance(error, (TypeError, ValueError))
            else f"{type(error).__name__}: {error}"
        )
        raise UserError(
            f"{name}{signature} does not fit: {message}",
            where,
            fix_of_parameters(config.optim, signature),
        ) from error
    for group in optimizer.param_groups:
        group["construction"] = construction._replace(initial=settings(group))
    return optimizer


def construct_groups(
    function: Callable[..., Any], named: list[tuple[str, torch.nn.Parameter]], config: Config
) -> torch.optim.Optimizer:
    """Calls a function of the named parameters that creates an optimizer. Its groups set rates,
    decay and momentum; the recipe multiplies the rates.

    Raises UserError if it does not return an optimizer of all of them.
    """
    where = config.where("optim.name")
    _check_own_groups(config)
    signature = inspect.signature(function)
    try:
        bound = signature.bind(list(named), **config.optim.options)
    except TypeError as error:
        what = f"{config.optim.name}{signature} does not fit: {error}"
        raise UserError(what, where, fix_of_parameters(config.optim, signature)) from error
    try:
        optimizer = function(*bound.args, **bound.kwargs)
    except UserError:
        raise
    except Exception as error:
        what = f"{config.optim.name} fails: {type(error).__name__}: {error}"
        raise UserError(
            what, f"{where}; {own_line(error)}", "a function of `named` that returns an optimizer"
        ) from error
    if not isinstance(optimizer, torch.optim.Optimizer):
        what = (
            f"{config.optim.name} returns a {type(optimizer).__name__}, not a torch.optim.Optimizer"
        )
        raise UserError(
            what,
            where,
            'def make(named): return torch.optim.AdamW([{"params": [...], "lr": 1e-3}, ...])',
        )
    check_closure(type(optimizer), config.optim.name, where)
    _check_all_are_there(optimizer, named, where)
    take(optimizer, ("lr",))
    for group in optimizer.param_groups:
        if "lr" not in group:
            what = f"a {type(optimizer).__name__} has no lr for the recipe to multiply"
            raise UserError(what, where, "an optimizer whose groups have lr")
        group["construction"] = group["construction"]._replace(rate=float(group["lr"]))
    if config.shard.stage:
        check_elementwise(optimizer, config.optim.name, where)
    return optimizer


def _check_own_groups(config: Config) -> None:
    """Raises UserError for keys that the groups already define."""
    if config.optim.origin("base_lr") == DEFAULT and config.optim.given is None:
        what = (
            f"{config.optim.name} creates groups with their own rates, which optim.base_lr would "
            "multiply"
        )
        raise UserError(what, config.where("optim.name"), "optim.base_lr=1")
    for key in ("weight_decay", "momentum", "exclude"):
        if (
            config.optim.origin(key) != DEFAULT
            and getattr(config.optim, key) != type(config.optim).model_fields[key].default
        ):
            what = (
                f"{config.optim.name} creates groups with their own {key}, so optim.{key} would "
                "have no effect"
            )
            raise UserError(
                what,
                config.where(f"optim.{key}"),
                f"leave optim.{key} out, and set {key} in the groups",
            )
    if config.recipe.cycle_momentum:
        what = f"{config.optim.name} creates groups with their own momentum"
        raise UserError(
            what,
            config.where("recipe.cycle_momentum"),
            "leave it out, or a class of torch.optim for optim.name",
        )
    if config.parallel.ranks > 1:
        key = f"parallel.{config.parallel.cut_by}"
        what = (
            f"{config.optim.name} creates groups of all parameters of the model, but here "
            "each rank only has a part of them"
        )
        raise UserError(
            what,
            config.where(key),
            f"leave {key} out, or a class of torch.optim for optim.name",
        )


def _check_all_are_there(
    optimizer: torch.optim.Optimizer, named: list[tuple[str, torch.nn.Parameter]], where: str
) -> None:
    has = {p for group in optimizer.param_groups for p in group["params"]}
    if not has & {p for _, p in named}:
        what = (
            "the optimizer has none of the parameters it was given: hvdtrain trains a copy of a "
            "script's model"
        )
        raise UserError(what, where, "use those of `named`, a list of (name, parameter)")
    if left_out := [name for name, p in named if p not in has]:
        more = f" and {len(left_out) - 1} more" if len(left_out) > 1 else ""
        what = f"the optimizer does not contain {left_out[0]}{more}, which would be trained"
        raise UserError(
            what,
            where,
            "add a group for all others; model.freeze=[...] excludes parameters from training",
        )
    if len(has) > len(named):
        raise UserError(
            "the optimizer has parameters that are not among those it was given",
            where,
            "use only those of `named`",
        )


def check_closure(kind: Any, name: str, where: str) -> None:
    """Raises UserError for a class whose step() re-evaluates the loss."""
    if any(
        argument.default is argument.empty
        for argument in list(inspect.signature(kind.step).parameters.values())[1:]
    ):
        what = f"{name} needs a closure that recomputes the loss within a step"
        raise UserError(what, where, "give an optimizer that needs one gradient per step")


def take(optimizer: torch.optim.Optimizer, follow: tuple[str, ...]) -> None:
    """Adds the entries that checkpoints and shard.stage need to each parameter group of an existing
    optimizer."""
    signature = signature_of(type(optimizer))
    known = signature.parameters if signature else {}
    arguments = {key: value for key, value in optimizer.defaults.items() if key in known}
    changed = [
        key
        for key, value in arguments.items()
        if key != "lr" and not _is_same(value, known[key].default)
    ]
    is_of_torch = type(optimizer).__module__.startswith("torch.optim.")
    options = tuple(key for key in changed if key in _IN_CONSTRUCTORS_OF_TORCH or not is_of_torch)
    for group in optimizer.param_groups:
        # torch adds it for named parameters; parts of parameters have no names
        group.pop("param_names", None)
        initial = settings(group)
        group |= {
            "excluded": False,
            "follow": follow,
            "construction": Construction(type(optimizer), arguments, options, initial),
        }


def _is_same(value: Any, default: Any) -> bool:
    return value is default or (
        type(value) is type(default)
        and not isinstance(value, torch.Tensor)
        and bool(value == default)
    )


def signature_of(constructor: Callable[..., Any]) -> inspect.Signature | None:
    """Returns the signature of a class; None if it is not a class, or has no signature because it
    is written in C."""
    try:
        return inspect.signature(constructor) if inspect.isclass(constructor) else None
    except ValueError:
        return None


def arguments(signature: inspect.Signature, config: Config) -> dict[str, Any]:
    """Returns the constructor's arguments: the options, and lr and momentum or betas if it has
    them, because it may validate them together."""
    options = dict(config.optim.options)
    momentum = config.optim.momentum
    if "lr" in signature.parameters:
        options["lr"] = config.optim.base_lr
    if momentum is not None and "momentum" in signature.parameters:
        options["momentum"] = momentum
    elif momentum is not None and "betas" in signature.parameters:
        betas = options.get("betas", signature.parameters["betas"].default)
        if isinstance(betas, (tuple, list)):
            options["betas"] = (momentum, *betas[1:])
    return options


def followed(group: dict[str, Any], name: str, config: Config) -> tuple[str, ...]:
    """Returns the fields of Hyper that a group of a user's class supports. Raises UserError if it
    lacks one that the configuration sets."""
    has = {
        "lr": "lr" in group,
        "weight_decay": "weight_decay" in group,
        "momentum": not {"momentum", "betas"}.isdisjoint(group),
    }
    asked = {
        "lr": True,
        "weight_decay": config.optim.decay > 0,
        "momentum": config.optim.momentum is not None or config.recipe.cycle_momentum,
    }
    for key, is_asked in asked.items():
        if is_asked and not has[key]:
            asking = (
                f"optim.{key}"
                if key != "momentum" or config.optim.momentum is not None
                else "recipe.cycle_momentum"
            )
            where = config.where("optim.name" if key == "lr" else asking)
            fix = (
                "give another class"
                if key == "lr"
                else f"leave {asking} out, or give another class"
            )
            raise UserError(
                f"{name} has no {key}; it has {', '.join(sorted(group.keys() - OWN_KEYS))}",
                where,
                fix,
            )
    is_set = asked | {"weight_decay": config.optim.weight_decay is not None}
    return tuple(key for key in has if has[key] and is_set[key])


def numbers(entries: dict[str, Any]) -> dict[str, float]:
    """Returns the Python numbers among entries, by key and type: {"step:int": 3}."""
    kinds = {key: _kind(value) for key, value in entries.items()}
    return {f"{key}:{kind}": entries[key] for key, kind in kinds.items() if kind}


def _kind(value: Any) -> str | None:
    return next((kind for kind, of in KINDS.items() if isinstance(value, of)), None)


def settings(group: dict[str, Any]) -> dict[str, Any]:
    """Returns the numbers() of a parameter group, and copies of its tuples and lists of numbers:
    {"betas:tuple-float": (0.9, 0.999)}, or "tuple-int-float" of (0, 0.999)."""
    values: dict[str, Any] = numbers(group)
    for key, value in group.items():
        name = next((name for name, of in LISTS.items() if type(value) is of), None)
        kinds = [_kind(number) for number in value] if name and key not in OWN_KEYS else []
        if name and kinds and None not in kinds:
            told = kinds if len(set(kinds)) > 1 else kinds[:1]
            values["-".join([f"{key}:{name}", *map(str, told)])] = LISTS[name](value)
    return values


def as_tensors(entries: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Returns the live tensors among entries, and numbers as new 0-d float64 tensors; everything
    else is skipped."""
    tensors = {key: value for key, value in entries.items() if isinstance(value, torch.Tensor)}
    return tensors | {
        key: torch.tensor(float(value), dtype=torch.float64, device="cpu")
        for key, value in numbers(entries).items()
    }


def counters(group: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Returns the values of a parameter group that a user's class or a scheduler changes: numbers,
    tuples and lists of numbers that differ from those after construction, and tensors of one
    number."""
    if "construction" not in group:
        return {}
    ours = OWN_KEYS.union(group["follow"])
    if "momentum" in group["follow"] and "momentum" not in group:
        ours.add("betas")
    initial = group["construction"].initial
    own = {
        key: value
        for key, value in group.items()
        if key not in ours and (not torch.is_tensor(value) or value.numel() == 1)
    }
    found = settings(own)
    unchanged = {key for key, value in found.items() if initial.get(key) == value}
    lists = {
        key: torch.tensor([float(number) for number in value], dtype=torch.float64, device="cpu")
        for key, value in found.items()
        if type(value) in LISTS.values()
    }
    return {key: t for key, t in (as_tensors(own) | lists).items() if key not in unchanged}


def load_entries(
    entries: dict[str, Any],
    live: dict[str, torch.Tensor],
    arrays: dict[str, np.ndarray],
    device: torch.device,
    counts_on_host: bool,
) -> None:
    """Copies arrays into the `live` tensors of entries, creates missing ones, and removes those
    that the arrays lack.

    Raises UserError if the optimizer cannot take an array.
    """
    for key in live.keys() - arrays.keys():
        del entries[name_of(key)]
    for key, array in arrays.items():
        saved = torch.tensor(np.asarray(array), device="cpu")
        if name_of(key) != key:
            entries[name_of(key)] = _value_of(key, saved)
        elif key not in live:
            entries[key] = saved if key == "step" and counts_on_host else saved.to(device)
        elif live[key].shape != saved.shape:
            what = (
                f"state {key} has shape {tuple(saved.shape)}, the optimizer's has "
                f"{tuple(live[key].shape)}"
            )
            raise UserError(what, "state of the optimizer", FIX)
        else:
            live[key].copy_(saved)


def name_of(key: str) -> str:
    """Returns the entry of a key of as_tensors() or settings(): "step:int" is step."""
    name, _, kind = key.rpartition(":")
    return name if name and kind.partition("-")[0] in KINDS | LISTS else key


def _value_of(key: str, saved: torch.Tensor) -> Any:
    """Converts a saved value to the number, tuple or list of a key of settings()."""
    first, *kinds = key.rpartition(":")[2].split("-")
    if first in KINDS:
        return KINDS[first](saved.item())
    values = saved.tolist()
    each = kinds if len(kinds) > 1 else kinds * len(values)
    return LISTS[first](KINDS[kind](number) for kind, number in zip(each, values, strict=True))


def try_step(
    group: dict[str, Any],
    p: torch.nn.Parameter,
    load: Callable[[torch.optim.Optimizer, torch.nn.Parameter], None],
) -> None:
    """Raises UserError if a step from the loaded state fails, as it may with another class or other
    options.

    A new optimizer of the same class makes the step, for a copy of `p` with a zero gradient. Takes
    the memory of its state.
    """
    error = _error_of_step(group, p, load)
    if error and not _error_of_step(
        group, p, lambda *_: None
    ):  # if this step fails, too, the state is not the reason
        what = (
            f"{group['construction'].path} cannot resume from this state: {type(error).__name__}: "
            f"{error}"
        )
        raise UserError(what, "state of the optimizer", FIX) from error


def has_modes(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer has separate weights for training and evaluation, switched by train()
    and eval(), as schedule-free ones do."""
    return callable(getattr(optimizer, "train", None)) and callable(
        getattr(optimizer, "eval", None)
    )


def set_mode(optimizer: torch.optim.Optimizer, *, training: bool) -> None:
    """Switches to the weights to train or to evaluate, if there are two sets. Repeating a mode does
    nothing, as in the classes."""
    if has_modes(optimizer):
        switched: Any = optimizer
        switched.train() if training else switched.eval()


def check_elementwise(optimizer: torch.optim.Optimizer, name: str, where: str) -> None:
    """Raises UserError for a user's class whose steps on two parts of a parameter differ from its
    step on the whole, which shard.stage does not support.

    Compares three steps of a 4 x 6 parameter.
    """
    first = optimizer.param_groups[0]
    if "construction" not in first:
        return
    if has_modes(optimizer):
        what = (
            f"train() and eval() of {name} switch between two sets of weights, but each rank "
            "would have only its parts of them"
        )
        raise UserError(
            what,
            where,
            "an optimizer without modes; or shard.stage=0 and no parallel.*",
        )
    numbers = torch.linspace(-1.0, 1.0, 24, dtype=torch.float64, device="cpu")
    try:
        whole = _steps(first, [numbers.view(4, 6)])
        parts = _steps(first, [numbers[:11], numbers[11:]])
        reason = (
            ""
            if torch.allclose(whole, parts, rtol=1e-9, atol=1e-12)
            else "gives other numbers than one on the whole"
        )
    except Exception as error:
        reason = f"fails: {type(error).__name__}: {error}"
    if reason:
        fix = (
            "an optimizer of hvdtrain, an elementwise class such as torch.optim.AdamW, or "
            "shard.stage=0"
        )
        raise UserError(
            f"shard.stage makes steps on parts of a parameter; such a step of {name} {reason}",
            where,
            fix,
        )


def _steps(group: dict[str, Any], starts: list[torch.Tensor]) -> torch.Tensor:
    """Returns the numbers after three steps of a new optimizer of the same class, (24,)."""
    parameters = [torch.nn.Parameter(start.clone()) for start in starts]
    construction = group["construction"]
    own = {key: group[key] for key in OWN_KEYS} | {"params": parameters}
    optimizer = construction.constructor([own], **construction.arguments)
    for step in range(3):
        gradient = torch.cos(torch.arange(24, dtype=torch.float64, device="cpu") * (step + 1))
        for p, g in zip(parameters, gradient.split([p.numel() for p in parameters]), strict=True):
            p.grad = g.view(p.shape).clone()
        optimizer.step()
    return torch.cat([p.detach().view(-1) for p in parameters])


def keys_of_numbers_of_class(group: dict[str, Any], like: torch.Tensor) -> set[str]:
    """Returns the keys for keys_of_numbers(), from a step of a new optimizer on a parameter of one
    element; none if that fails."""
    p = torch.nn.Parameter(like.detach().new_zeros(1))
    p.grad = torch.zeros_like(p)
    # an error of user code, which its real step will raise again
    with contextlib.suppress(Exception):
        optimizer = _new(group, p)
        set_mode(optimizer, training=True)
        optimizer.step()
        return {key for key, tensor in as_tensors(optimizer.state[p]).items() if not tensor.ndim}
    return set()


def _new(group: dict[str, Any], p: torch.nn.Parameter) -> torch.optim.Optimizer:
    """Returns an optimizer of the same class, without state."""
    construction: Construction = group["construction"]
    made: torch.optim.Optimizer = construction.constructor(
        [{key: group[key] for key in OWN_KEYS} | {"params": [p]}], **construction.arguments
    )
    return made


def _error_of_step(
    group: dict[str, Any],
    p: torch.nn.Parameter,
    load: Callable[[torch.optim.Optimizer, torch.nn.Parameter], None],
) -> Exception | None:
    """Returns the exception of a first step after `load`."""
    copy = torch.nn.Parameter(p.detach().clone())
    copy.grad = torch.zeros_like(copy)
    try:
        optimizer = _new(group, copy)
        load(optimizer, copy)
        set_mode(optimizer, training=True)
        optimizer.step()
    except Exception as error:
        return error
    return None
