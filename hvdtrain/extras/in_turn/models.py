"""ModelsInTurn: several models of a script that step in turn, with one state for all of them."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from hvdtrain.comm.communicator import Communicator
from hvdtrain.comm.mesh import Mesh
from hvdtrain.comm.order import SameOrder, doing_in
from hvdtrain.config.schema import Config
from hvdtrain.core.arrays import Arrays, ArrayStream, Piece, as_stream
from hvdtrain.core.progress import fold
from hvdtrain.errors import UserError
from hvdtrain.extras.in_turn.member import FrozenModel, Member
from hvdtrain.frameworks.learner import CurrentPass, Shapes, gather
from hvdtrain.frameworks.torch.arrangements import arrangement_of
from hvdtrain.frameworks.torch.build import device_of_rank
from hvdtrain.frameworks.torch.device import seed_layers
from hvdtrain.frameworks.torch.parallel.whole_model import WholeModel
from hvdtrain.frameworks.torch.precision import pick_precision
from hvdtrain.frameworks.torch.step import one_or_nan
from hvdtrain.frameworks.torch.user_loop.checks import uncompiled
from hvdtrain.frameworks.torch.user_loop.losses import LossesOfBatch
from hvdtrain.frameworks.torch.user_loop.prepared import WHERE, AmpScaling, precision_is_asked
from hvdtrain.frameworks.user_loop import Divisor, Samples

_FIX = (
    "the same steps in the same order on every rank, none under `if ctx.rank == 0` or by a number "
    "that differs between ranks; ctx.mean() makes one equal"
)


class _Excluded(NamedTuple):
    """A setting that needs gradients to be reduced within the backward pass of one model."""

    key: str
    is_set: Callable[[Config], bool]
    fix: str


EXCLUDED = (
    _Excluded("shard.stage", lambda c: c.shard.stage == 3, "shard.stage=2"),
    _Excluded("comm.local_steps", lambda c: c.comm.local_steps > 1, "comm.local_steps=1"),
    _Excluded("comm.op", lambda c: c.comm.op == "adasum", "comm.op=average"),
    _Excluded(
        "comm.reduce",
        lambda c: c.comm.reduce in ("ddp", "distributed_optimizer"),
        "comm.reduce=auto",
    ),
    _Excluded(
        "speed.precision",
        lambda c: c.speed.precision == "fp16",
        "speed.precision=bf16; or torch.amp.GradScaler, with optimizer.synchronize() before "
        "scaler.step(optimizer)",
    ),
    _Excluded(
        "parallel.*",
        lambda c: arrangement_of(c) is not WholeModel,
        "shard.stage=1 or 2, which divide optimizer state",
    ),
)


class ModelsInTurn(LossesOfBatch):
    """The learner of all named models. Gradients stay on their rank, as in plain torch, until the
    optimizer of their model steps.

    Array names are those of each model with its name in front: "p.generator.0.weight". Raises
    UserError for a configuration that does not support several models.
    """

    def __init__(self, config: Config, mesh: Mesh, on_step: Callable[[], None]) -> None:
        """on_step: called after the first step of each batch."""
        _check(config)
        self.config = config
        self.mesh = mesh
        self.data = mesh.data
        self.readers = mesh.data
        self.device = device_of_rank(config, mesh.world)
        self.sample_type = (
            pick_precision(config, self.device, mesh.world).weights
            if precision_is_asked(config)
            else None
        )
        self.divisor = Divisor(config, mesh.data)
        self._on_step = on_step
        self._order = SameOrder(
            mesh.world,
            mesh.world.rank,
            "optimizer.step()",
            _FIX,
            what="ranks step in different orders",
        )
        self._models: dict[str, Member | FrozenModel] = {}
        self._batch: Samples | None = None  # the last one
        self._global_batch = 0
        self._has_stepped = True
        self._is_over = False  # a checkpoint may have the batch

    def add(
        self, name: str, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None
    ) -> Member | FrozenModel:
        """Prepares one more model; without an optimizer it is not trained. A collective."""
        _check_name(name, self._models)
        if optimizer is None:
            self._models[name] = FrozenModel(self.config, self.mesh, model)
        else:
            self._check_shared(name, model)
            member = Member(self.config, self.mesh, model, optimizer, name)
            member.connect(
                functools.partial(self._step, member), functools.partial(self._synchronize, member)
            )
            self._models[name] = member
        return self._models[name]

    def _check_shared(self, name: str, model: torch.nn.Module) -> None:
        for member in self._members:
            if shared := member.shared_with(model):
                raise UserError(
                    f"{member.name} and {name} both train {shared} of {member.name}, but the step "
                    "of one model clears the gradients that the other one needs",
                    WHERE,
                    "a model with its own name and optimizer for the layers that both use",
                )

    @property
    def _members(self) -> list[Member]:
        """The models that are trained."""
        return [model for model in self._models.values() if isinstance(model, Member)]

    def begin_step(self, batch: Samples, global_batch: int, seed: int) -> Samples:
        """Begins a batch. A collective, in which ranks compare the steps of the batch before."""
        self._order.ask("the next batch")
        self._batch = batch
        self._global_batch = global_batch
        self._has_stepped = self._is_over = False
        self.divisor.items = None
        seed_layers(fold(seed, batch.step), self.mesh, self.data, self.config, self.device)
        for member in self._members:
            member.begin_batch()
        return batch

    def begin_part(self) -> None:
        for member in self._members:
            member.begin_part()

    def pass_all(
        self,
        parts: Sequence[Samples],
        loss_of: Callable[[Samples], tuple[torch.Tensor, float]],
        divisor: float,
        *,
        retain_graph: bool = False,
    ) -> None:
        """Adds the gradient of this rank's weight * loss / divisor to the gradients of every model
        that the loss depends on."""
        for part in parts:
            loss, weight = loss_of(part)
            for member in self._members:
                member.begin_pass(is_counted=weight > 0)
            factor = one_or_nan(loss) if weight else 1.0
            (loss * (weight / divisor) * factor).sum().backward(retain_graph=retain_graph)
            for member in self._members:
                member.end_pass()

    def show_gradients(self, factor: float = 1.0) -> None:
        """Does nothing: they are reduced later."""

    def check_counted_parts(self) -> None:
        raise UserError(
            "loss_of(part) returns a count, which is not supported with several models",
            "ctx.accumulate()",
            "ctx.backward(loss, count=N)",
        )

    def _synchronize(self, member: Member) -> None:
        """Makes p.grad of a model the mean over the batch of all ranks. A collective."""
        self._begin(member, "synchronize()")
        member.reduce()

    def _step(self, member: Member, scaled: AmpScaling | None) -> None:
        self._begin(member, "step()")
        member.step(scaled)
        if not self._has_stepped:
            self._has_stepped = True
            self._on_step()

    def _begin(self, member: Member, call: str) -> None:
        """Raises UserError if the model cannot make this call now, or on every rank if another rank
        makes another one."""
        where = f"optimizer.{call} of {member.name}"
        if self._batch is None:
            raise UserError(
                f"optimizer.{call} outside of a loop over ctx.samples()",
                where,
                "for batch in ctx.samples(dataset, batch=N): ...",
            )
        if self._is_over:
            raise UserError(
                "a step after ctx.checkpoint() of the same batch, which a resumed run would lack",
                where,
                "ctx.checkpoint() after the last step of the batch",
            )
        self._order.ask(f"{call} of {member.name}")
        member.check_gradients(where)

    @property
    def has_stepped(self) -> bool:
        """Whether a model has stepped with the last batch."""
        return self._has_stepped

    def end_steps(self) -> None:
        self._is_over = True

    def check_prepared(self, model: Any, optimizer: Any, where: str) -> None:
        """Raises UserError if these are not the objects of one of the models; a checkpoint needs
        neither, because it has all of them."""
        if model is None and optimizer is None:
            return
        pairs = [(uncompiled(m.forward), m.optimizer) for m in self._models.values()]
        if not any(uncompiled(model) is m and optimizer is o for m, o in pairs):
            raise UserError(
                "the model or the optimizer is not one that ctx.prepare() returned",
                where,
                "ctx.checkpoint(), which saves all models and optimizers",
            )

    def under_way(self) -> CurrentPass | None:
        doing = doing_in([self._order])
        return CurrentPass(doing, None) if doing else None

    def read_nonfinite(self) -> float:
        return sum(member.read_nonfinite() for member in self._members)

    @property
    def lr(self) -> float:
        """The learning rate of the first optimizer."""
        return next((member.lr for member in self._members), 0.0)

    def sync_buffers(self, communicator: Communicator) -> None:
        self._order.ask("the end of a batch")
        for model in self._models.values():
            model.sync_buffers(communicator)

    # HasState, for all models.

    @property
    def is_sharded(self) -> bool:
        return any(model.is_sharded for model in self._models.values())

    def state(self, *, is_kept: bool = True) -> Arrays:
        return gather(self.mesh.parts, self.pieces(), is_kept=is_kept)

    def pieces(self) -> Iterator[Piece]:
        for name, model in self._models.items():
            for piece in model.pieces():
                yield piece._replace(name=_with_name(name, piece.name))

    def state_dict_names(self) -> dict[str, str]:
        """Returns the names of a torch.nn.ModuleDict that has all models."""
        return {
            f"{name}.{own}": _with_name(name, array)
            for name, model in self._models.items()
            for own, array in model.state_dict_names().items()
        }

    def load(self, state: Arrays | ArrayStream) -> None:
        stream = as_stream(state)
        shapes: dict[str, Shapes] = {}
        for array, shape in stream.shapes.items():
            name, own = self._place(array)
            shapes[name] = {**shapes.get(name, {}), own: shape}
        loadings = {
            name: model.loading(shapes.get(name, {}), is_partial=stream.is_partial)
            for name, model in self._models.items()
        }
        for array, values in stream.arrays:
            name, own = self._place(array)
            loadings[name].take(own, values)
        for loading in loadings.values():
            loading.finish()
        self._has_stepped = True

    def _place(self, array: str) -> tuple[str, str]:
        """Returns the name of an array's model, and the array's name there. Raises UserError for an
        array of another model."""
        kind, _, rest = array.partition(".")
        name, _, own = rest.partition(".")
        if name not in self._models:
            raise UserError(
                f"the state has {array}, but the models are {', '.join(self._models)}",
                "state of the model",
                "the names of ctx.prepare(..., name=) that the checkpoint was made with",
            )
        return name, f"{kind}.{own}"

    def describe(self) -> str:
        return "; ".join(f"{name}: {model.describe()}" for name, model in self._models.items())


def _with_name(name: str, array: str) -> str:
    kind, _, own = array.partition(".")
    return f"{kind}.{name}.{own}"


def _check(config: Config) -> None:
    for excluded in EXCLUDED:
        if excluded.is_set(config):
            raise UserError(
                f"{excluded.key} is not supported with several models, whose gradients are "
                "reduced when their optimizer steps",
                f"{WHERE}, {config.where(excluded.key)}",
                excluded.fix,
            )


def _check_name(name: object, names: dict[str, Any]) -> None:
    fix = 'a name for each model: ctx.prepare(model, optimizer, name="generator")'
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_-]+", name):
        raise UserError(f"name={name!r:.60} is not a name of letters, digits, _ and -", WHERE, fix)
    if name in names:
        raise UserError(f"there are two models with name={name!r}", WHERE, fix)
