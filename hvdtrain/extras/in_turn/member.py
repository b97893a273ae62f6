"""A model among several that step in turn: with its optimizer, or without one."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hvdtrain.comm.communicator import Communicator
from hvdtrain.comm.mesh import Mesh
from hvdtrain.config.schema import Config
from hvdtrain.core.arrays import Arrays, ArrayStream
from hvdtrain.errors import UserError
from hvdtrain.extras.in_turn.local_gradients import LocalGradients
from hvdtrain.frameworks.learner import Shapes
from hvdtrain.frameworks.torch.buffers import Buffers
from hvdtrain.frameworks.torch.build import device_of_rank
from hvdtrain.frameworks.torch.device import all_on_gpus, keep_gradients
from hvdtrain.frameworks.torch.optim.user_optimizer import set_mode
from hvdtrain.frameworks.torch.precision import Scale, pick_precision
from hvdtrain.frameworks.torch.rank_model import RankModel
from hvdtrain.frameworks.torch.state import LearnerState, Loading
from hvdtrain.frameworks.torch.strategy import Strategy
from hvdtrain.frameworks.torch.user_loop.checks import uncompiled
from hvdtrain.frameworks.torch.user_loop.prepared import (
    AmpScaling,
    PreparedOptimizer,
    compute_in,
    precision_is_asked,
)
from hvdtrain.frameworks.torch.user_loop.prepared_model import PreparedModel


class MemberOptimizer(PreparedOptimizer):
    """The optimizer of one of several models. zero_grad() clears its gradients, as in torch."""

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        update: Callable[[AmpScaling | None], None],
        synchronize: Callable[[], None],
        clear: Callable[[], None],
    ) -> None:
        super().__init__(inner, update)
        self._synchronize = synchronize
        self._clear = clear

    def synchronize(self) -> None:
        """Makes p.grad the gradient of the mean over the batch of all ranks, for code between
        backward and step, such as clip_grad_norm_(). A collective; step() calls it otherwise."""
        with torch.no_grad():
            self._synchronize()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients of this optimizer's model, of every backward pass so far."""
        self._clear()


class Member(PreparedModel):
    """A model whose gradients stay on this rank until they are reduced for its step."""

    optimizer: MemberOptimizer

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        name: str,
    ) -> None:
        if mesh.data.size > 1:  # Horovod's optimizer would reduce them in each backward pass
            config = config.replace(comm=config.comm.replace(reduce="bucket"))
        super().__init__(config, mesh, model, optimizer, prefix=f"{name}.")
        self.name = name
        self._local = LocalGradients([p for _, p in self._named])
        self._is_reduced = False
        self._is_stale = False  # has gradients of an earlier batch

    def connect(
        self, step: Callable[[AmpScaling | None], None], synchronize: Callable[[], None]
    ) -> None:
        """Creates the script's optimizer, which makes these calls."""
        self.optimizer = MemberOptimizer(self._inner, step, synchronize, self.zero_grad)

    def shared_with(self, model: torch.nn.Module) -> str:
        """Returns the name of a parameter that this model and another one train; empty if there is
        none."""
        theirs = {p for p in model.parameters() if p.requires_grad}
        return next((name for name, p in self._named if p in theirs), "")

    def begin_batch(self) -> None:
        self._is_stale = self._local.are_there
        self.begin_training()

    def begin_part(self) -> None:
        self._watch.begin_part()

    def begin_pass(self, *, is_counted: bool) -> None:
        """Called before each backward pass, which adds to the gradients of those before."""
        if self._is_reduced and not self._local.are_there:  # the module's zero_grad()
            self.zero_grad()
        if self._is_reduced:
            raise UserError(
                "a backward pass between optimizer.synchronize() and optimizer.step()",
                f"ctx.backward(), optimizer of {self.name}",
                "synchronize() after the last backward pass of the step",
            )
        self._is_stale = self._is_stale and self._local.are_there
        self._watch.set_counted(is_counted)
        self._local.bring_back()

    def end_pass(self) -> None:
        keep_gradients(self.config.speed.compile, [p for _, p in self._named])
        self._local.hide()

    def check_gradients(self, where: str) -> None:
        """Raises UserError if the gradients are not those of ctx.backward() in this batch."""
        if not self._local.are_there or (self._local.are_of_others and not self._is_reduced):
            what = f"no ctx.backward(loss) has reached {self.name} since its last step"
            fix = (
                "ctx.backward(loss) instead of loss.backward(): it weights this rank's samples; "
                "the loss depends on this model"
            )
            raise UserError(what, where, fix)
        if self._is_stale:
            what = f"the gradients of {self.name} have parts of an earlier batch"
            fix = (
                "optimizer.zero_grad() before ctx.backward(loss), in every batch: gradients do not "
                "outlive a batch, so that a resumed run is the same"
            )
            raise UserError(what, where, fix)

    def reduce(self) -> None:
        """Makes p.grad the sum over ranks, or this rank's part of it. A collective."""
        if self._is_reduced:
            return
        self._local.bring_back()
        self.strategy.run([()], 1.0, lambda *_: {})
        self.strategy.reduce()
        self._gradients.show()
        self._is_reduced = True

    def step(self, scaled: AmpScaling | None) -> None:
        """Makes the optimizer's step. A collective."""
        self.reduce()
        self.make_step(scaled)
        if self._saves_buffers:
            self.buffers.save()

    def zero_grad(self) -> None:
        super().zero_grad()
        self._local.forget()
        self._is_reduced = self._is_stale = False

    def sync_buffers(self, communicator: Communicator) -> None:
        self.is_in_step = False
        super().sync_buffers(communicator)

    def loading(self, shapes: Shapes, *, is_partial: bool) -> Loading:
        """Returns LearnerState.loading()."""
        set_mode(self._inner, training=False)
        return self._state.loading(shapes, is_partial=is_partial)


class FrozenModel(RankModel):
    """A model that no optimizer changes: a teacher, or an average that the script computes. All
    ranks get rank 0's weights, and checkpoints have it."""

    is_sharded = False
    optimizer = None
    orders = ()

    def __init__(self, config: Config, mesh: Mesh, model: torch.nn.Module) -> None:
        self.config = config
        self.mesh = mesh
        self.device = device_of_rank(config, mesh.world)
        self.forward = model.to(self.device)
        self.model = uncompiled(model)
        self.strategy = Strategy([])
        if precision_is_asked(config):
            precision = pick_precision(config, self.device, mesh.world)
            self.model.to(precision.weights)
            compute_in(self.model, precision, self.device)
        self._buffers = Buffers(self.model, self.device)
        self._state = LearnerState(
            self.model,
            torch.optim.SGD([torch.nn.Parameter(torch.empty(0))]),  # of nothing
            Scale(),
            self.strategy,
            hashes_on_device=all_on_gpus(self.device, mesh.world),
            trained=(),
        )

    @property
    def prepared(self) -> torch.nn.Module:
        return self.forward

    @property
    def user_model(self) -> torch.nn.Module:
        return self.model

    def sync_buffers(self, communicator: Communicator) -> None:
        self._buffers.sync_buffers(communicator)

    def load(self, state: Arrays | ArrayStream) -> None:
        self._state.load(state)

    def loading(self, shapes: Shapes, *, is_partial: bool) -> Loading:
        """Returns LearnerState.loading()."""
        return self._state.loading(shapes, is_partial=is_partial)

    def describe(self) -> str:
        count = self.count(self.model.parameters())
        return f"{type(self.model).__name__}, {count:,} parameters, without an optimizer"
