"""StagePasses: the passes of a custom loop through the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from hvdtrain.comm.mesh import Mesh
from hvdtrain.core.metrics import Sums
from hvdtrain.errors import UserError
from hvdtrain.extras.pipeline.pipelined import Pipelined
from hvdtrain.frameworks.torch.forward import in_type
from hvdtrain.frameworks.torch.loop_passes import Found, LoopPasses
from hvdtrain.frameworks.torch.strategy import OnePass

_WHERE_CALLED = "model(...) with parallel.pipeline"


class StagePasses(LoopPasses):
    """No rank has all layers: the script's loss_of() is called for the inputs on the first stage,
    and for the loss on the last."""

    calls_model = False

    def __init__(
        self,
        model: torch.nn.Module,
        pipelined: Pipelined,
        mesh: Mesh,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """dtype: dtype of the weights."""
        self._stages = InStages(model, pipelined, mesh, dtype)
        super().__init__(self._stages)
        self._pipe = mesh.pipe
        self._dtype = dtype
        self._device = device

    def check_backward(self, where: str) -> None:
        what = (
            "with parallel.pipeline no rank has all layers of the model, and a backward pass "
            "needs all of them"
        )
        fix = (
            "loss = ctx.accumulate(loss_of, at_most=SAMPLES), loss_of(part): forward and loss "
            "of a part of the batch"
        )
        raise UserError(what, where, fix)

    def one_pass(
        self,
        loss_of: Callable[[Any], Found],
        weighted: Callable[[Any, Found], torch.Tensor],
        ended: Callable[[bool], None],
    ) -> OnePass:
        def through_stages(parts: Any, _: float, is_last: bool) -> Sums:
            self._stages.train_parts(parts, loss_of, weighted)
            ended(is_last)
            return {}

        return through_stages

    def over_stages(
        self, total: torch.Tensor, weight: float, *, is_counted: bool
    ) -> tuple[torch.Tensor, float, bool]:
        own = torch.tensor([float(total), weight, float(is_counted)], dtype=torch.float64)
        found = torch.as_tensor(self._pipe.allreduce(own, "loss of the last stage")).tolist()
        return (
            torch.tensor(found[0], dtype=self._dtype, device=self._device),
            found[1],
            bool(found[2]),
        )


class InStages(torch.nn.Module):
    """Within ctx.accumulate(loss_of), a call of the model stops on the first stage, which only
    needs its inputs, and returns the outputs on the last. Elsewhere, without gradients, it is a
    collective of a pipeline's ranks and returns the outputs on all of them.
    """

    def __init__(
        self, model: torch.nn.Module, pipelined: Pipelined, mesh: Mesh, dtype: torch.dtype
    ) -> None:
        """model: this rank's stages of the script's model. dtype: of the outputs."""
        super().__init__()
        self.model = model
        self._pipelined = pipelined
        self._pipe = mesh.pipe
        self._dtype = dtype
        self._asks = False  # whether only the inputs are wanted
        self._outputs: Any = None  # outputs of the part whose loss is computed
        self._calls = 0  # calls of the model in this part

    def train_parts(
        self,
        parts: Sequence[Any],
        loss_of: Callable[[Any], Any],
        weighted: Callable[[Any, Any], torch.Tensor],
    ) -> None:
        """Adds the gradient of the sum of weighted(part, loss_of(part)) to p.grad of this rank's
        stages. A collective."""
        self._pipelined.train(
            parts,
            lambda part: self._inputs_of(part, loss_of),
            lambda part, outputs: weighted(part, self._loss(part, outputs, loss_of)),
            _nothing,
        )

    def _inputs_of(self, part: Any, loss_of: Callable[[Any], Any]) -> torch.Tensor:
        self._asks = True
        try:
            loss_of(part)
        except _Inputs as found:
            return found.x
        finally:
            self._asks = False
        what = "loss_of(part) did not call the model that ctx.prepare() returned"
        raise UserError(what, "ctx.accumulate()", "loss(model(part['x']), ...)")

    def _loss(self, part: Any, outputs: Any, loss_of: Callable[[Any], Any]) -> Any:
        self._outputs = (in_type(outputs, self._dtype),)
        self._calls = 0
        try:
            return loss_of(part)
        finally:
            self._outputs = None

    def forward(self, x: torch.Tensor) -> Any:
        if torch.is_autocast_enabled(x.device.type):
            what = (
                "torch.autocast around the model has no effect on its stages, which are called "
                "elsewhere"
            )
            raise UserError(
                what,
                _WHERE_CALLED,
                "speed.precision=bf16 in hvdtrain.init(); the loss may be under torch.autocast",
            )
        if self._asks:
            raise _Inputs(x)
        if self._outputs is not None:
            self._calls += 1
            if self._calls > 1:
                raise UserError(
                    "loss_of(part) calls the model twice",
                    _WHERE_CALLED,
                    "call it once: the passes of all stages form one chain",
                )
            return self._outputs[0]
        if torch.is_grad_enabled():
            fix = (
                "ctx.accumulate(loss_of, at_most=SAMPLES) trains; an evaluation is under "
                "torch.no_grad()"
            )
            raise UserError(
                "no rank has all layers of the model, so none can run the backward pass alone",
                _WHERE_CALLED,
                fix,
            )
        return self._evaluated(x)

    def _evaluated(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the outputs (n, ...) on all ranks of the pipeline."""
        found: list[Any] = []
        self._pipelined.evaluate([x], lambda part: part, lambda _, outputs: found.append(outputs))
        if found and not isinstance(found[0], torch.Tensor):
            _refuse(found[0])
        shapes = self._pipe.allgather_object(tuple(found[0].shape) if found else None)
        if not found:
            found = [torch.zeros(next(shape for shape in shapes if shape is not None))]
        host = found[0].detach().to("cpu", self._dtype)
        # the other ranks contribute zeros
        return torch.as_tensor(self._pipe.allreduce(host, "outputs of the last stage")).to(x.device)


class _Inputs(BaseException):
    """Raised to stop the script's loss_of() at the call of the model, when only the inputs are
    needed."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


def _nothing(phase: str) -> None:
    """Phases of a step are not timed here."""


def _refuse(outputs: Any) -> NoReturn:
    what = (
        f"the model returns a {type(outputs).__name__}, but the last stage can only send one "
        "tensor to the others"
    )
    raise UserError(what, _WHERE_CALLED, "a model whose output is a tensor")
