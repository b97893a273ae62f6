"""Pipeline: the passes of one step through stages on several ranks, over the messages of a
communicator.

torch.distributed.pipelining has the same schedules. They need at least as many micro-batches as
stages, all of the same size, and interleaved schedules only support some numbers. They exchange
shapes in pickled messages, and do not report how long a rank waits. Here, micro-batches may have
any sizes and numbers, so that no sample is padded. The order of passes comes from the simulation
that predicts their time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.distributed.pipelining._backward import (
    stage_backward_input,
    stage_backward_weight,
)  # the split of torch's zero-bubble schedules

from hvdtrain.comm.communicator import Communicator, Handle, PointToPoint, point_to_point
from hvdtrain.comm.staging import Accelerator
from hvdtrain.extras.pipeline.messages import (
    AnyMessages,
    Messages,
    direct_messages,
    on_host,
)
from hvdtrain.extras.pipeline.schedule import (
    Action,
    Schedule,
    takes_in_order,
    timeline,
)
from hvdtrain.extras.pipeline.stages import Autocast, Stage, Tied, units_of
from hvdtrain.extras.pipeline.times import (
    Between,
    MarkedPass,
    MarkedRun,
    Spent,
    Times,
)
from hvdtrain.frameworks.learner import CurrentPass, TimedPass

AHEAD = 2  # passes for which a rank has started receives while it makes another pass
DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
)
MOST_AXES = 8

# the number of a micro-batch -> (n, ...), on the device; called on the first stage's rank
InputsOf = Callable[[int], torch.Tensor]
# takes the model's outputs of a micro-batch; called on the last stage's rank
OutputsTo = Callable[[int, Any], Any]


def measured_bubble(spent: Sequence[Spent]) -> float:
    """Returns the share of the time that ranks are idle, 0 to 1: the mean over `spent`, the times
    of each rank of a pipeline in a step."""
    slowest = max(each.seconds for each in spent)
    busy = sum(each.seconds - each.waiting for each in spent) / len(spent)
    return 1 - busy / slowest if slowest else 0.0


class Pipeline:
    """Runs passes through the stages. Every rank of `communicator` makes the same calls, with the
    same `samples`."""

    def __init__(
        self,
        stages: Mapping[int, Stage],
        communicator: Communicator,
        schedule: Schedule,
        device: torch.device,
        where: str,
        gpus: Accelerator | None = None,
    ) -> None:
        """stages: this rank's stages on `device`, by number: rank, rank + ranks, ..., the same
        count on each rank. gpus: see Messages.

        Raises UserError if the engine has no point-to-point messages; `where` is the key that
        requires them.
        """
        self._ranks = point_to_point(communicator, where)
        self._messages = Messages(self._ranks, device, gpus)
        self._direct = direct_messages(self._ranks, device)
        self._stages = stages
        self._schedule = schedule
        self._orders: dict[tuple[int, bool], _Order] = {}
        self._running: _Run | None = None
        self.last: MarkedRun | None = None  # of train() or evaluate()
        self._trained: MarkedRun | None = None

    @property
    def spent(self) -> Spent:
        """The time of the last call of train() or evaluate()."""
        return self.last.spent() if self.last else Spent(0.0, 0.0)

    @property
    def passes(self) -> list[TimedPass]:
        """The passes of the last call of train()."""
        return self._trained.timed_passes() if self._trained else []

    def under_way(self) -> CurrentPass | None:
        """Returns the current pass; callable from any thread. waits_for is a rank of the
        pipeline."""
        run = self._running
        return run.under_way if run else None

    def train(
        self,
        samples: Sequence[int],
        inputs: InputsOf,
        loss: OutputsTo,
        enter: Callable[[str], None] = lambda phase: None,
    ) -> None:
        """Adds the gradient of the sum over micro-batches of loss(number, outputs), a scalar, to
        p.grad of this rank's stages.

        samples: number in each micro-batch; empty ones are skipped. Dropout draws from torch's
        generator in the order of the passes. enter: a stopwatch's, for forward, backward, and
        communication while waiting for other ranks.
        """
        self._trained = self._run(samples, inputs, loss, enter, backward=True)

    @torch.no_grad()
    def evaluate(self, samples: Sequence[int], inputs: InputsOf, outputs: OutputsTo) -> None:
        """Calls outputs(number, outputs) for each micro-batch with samples."""
        self._run(samples, inputs, outputs, lambda phase: None, backward=False)

    def add_tied(self, tied: Sequence[Tied]) -> None:
        """Sets p.grad of each copy of a tied parameter to the bit-identical sum over all copies.

        All ranks call it with the same parameters, after p.grad was summed over data-parallel
        ranks.
        """
        me = self._ranks.rank
        size = self._ranks.size
        for name, p, stages in tied:
            ranks = sorted({stage % size for stage in stages})
            if me not in ranks or len(ranks) == 1:
                continue
            own = torch.zeros_like(p) if p.grad is None else p.grad
            copies = {
                rank: own.cpu().contiguous()
                if rank == me
                else torch.empty(p.shape, dtype=own.dtype)
                for rank in ranks
            }
            others = [rank for rank in ranks if rank != me]
            handles = [
                self._ranks.start_recv(copies[rank], rank, f"pipeline.{name}") for rank in others
            ]
            handles += [
                self._ranks.start_send(copies[me], rank, f"pipeline.{name}") for rank in others
            ]
            for handle in handles:
                handle.wait()
            p.grad = torch.stack([copies[rank] for rank in ranks]).sum(0).to(p.device)

    @torch.no_grad()
    def send_tied(self, tied: Sequence[Tied]) -> None:
        """Copies the weights of a tied parameter from the first rank that has it to the other
        copies. All ranks call it with the same parameters."""
        me = self._ranks.rank
        size = self._ranks.size
        handles = list[Handle]()
        arrived = list[tuple[torch.Tensor, Any]]()
        for name, p, stages in tied:
            first, *others = sorted({stage % size for stage in stages})
            if me == first and others:
                own = on_host(p)
                handles += [
                    self._ranks.start_send(own, rank, f"pipeline.{name}.weights") for rank in others
                ]
            elif me in others:
                weights = torch.empty(p.shape, dtype=p.dtype)
                handles.append(self._ranks.start_recv(weights, first, f"pipeline.{name}.weights"))
                arrived.append((p, weights))
        for handle in handles:
            handle.wait()
        for copy, weights in arrived:
            copy.copy_(weights)

    def _run(
        self,
        samples: Sequence[int],
        inputs: InputsOf,
        finish: OutputsTo,
        enter: Callable[[str], None],
        backward: bool,
    ) -> MarkedRun:
        numbers = [number for number, n in enumerate(samples) if n]
        made = list[MarkedPass]()
        order = self._order(len(numbers), backward)
        messages: AnyMessages = self._messages
        if self._direct is not None and order.is_taken_in_order:
            messages = self._direct
        times = messages.times()
        start = times.mark()
        self._running = run = _Run(
            self._ranks,
            messages,
            self._stages,
            [samples[number] for number in numbers],
            enter,
            times,
        )
        for at, action in enumerate(order.actions):
            run.prepare(order.actions[at : at + AHEAD + 1])
            number = numbers[action.micro]
            began = times.mark()
            waited = len(run.waits)
            run.begin(action, number)
            if action.kind == "forward":
                run.forward(action, partial(inputs, number), partial(finish, number), backward)
            else:
                run.backward(action)
            span = Between(began, times.mark())
            made.append(MarkedPass(action, number, span, run.waits[waited:]))
        run.finish()
        enter("communication")
        self.last = MarkedRun(times, Between(start, times.mark()), run.waits, made)
        self._running = None
        return self.last

    def _order(self, micro: int, backward: bool) -> _Order:
        """Returns the order of this rank's actions."""
        key = (micro, backward)
        if key not in self._orders:
            ranks = self._ranks.size
            virtual = len(self._stages)
            found = timeline(self._schedule, ranks, micro, virtual, backward=backward)
            self._orders[key] = _Order(found.order(self._ranks.rank), takes_in_order(found))
        return self._orders[key]


class _Order(NamedTuple):
    """The actions of a rank in a step."""

    actions: list[Action]
    is_taken_in_order: bool  # on all ranks, messages are taken as they are sent


class _Run:
    """The pending work of a step. Each boundary and direction has a separate tag, and its messages
    arrive in the order of micro-batches."""

    def __init__(
        self,
        ranks: PointToPoint,
        messages: AnyMessages,
        stages: Mapping[int, Stage],
        samples: Sequence[int],
        enter: Callable[[str], None],
        times: Times,
    ) -> None:
        self._ranks = ranks
        self._messages = messages
        self._stages = stages
        self._samples = samples
        self._enter = enter
        self._last = len(stages) * ranks.size - 1
        self._passes: dict[tuple[int, int], MicroBatch] = {}  # by stage and micro-batch
        self._forms: dict[int, _ActivationSpec] = {}  # dtype and shape of the inputs of a stage
        self._coming: dict[Action, Handle] = {}
        self._outputs: dict[tuple[int, int], Handle] = {}  # on their way to the next stage
        self._gradients: list[tuple[Handle, int]] = []  # on their way to another stage
        self._times = times
        self.waits: list[Between] = []  # for other ranks
        self.under_way: CurrentPass | None = None
        self._phase = "forward"

    def begin(self, action: Action, number: int) -> None:
        """Records that the pass of micro-batch `number` has begun."""
        kind = f"{action.kind} pass" if action.kind in ("forward", "backward") else action.kind
        self.under_way = CurrentPass(
            f"{kind} of micro-batch {number} in stage {action.stage}", None
        )
        self._phase = "forward" if action.kind == "forward" else "backward"
        self._enter(self._phase)

    def prepare(self, actions: Sequence[Action]) -> None:
        """Starts to receive the inputs of the passes, up to the first one of each rank whose shape
        is not known yet: from one rank they are received in the order in which it sends them."""
        unknown = set[int]()  # ranks
        for action in actions:
            source = self._source_of(action)
            if source is None or action in self._coming:
                continue
            rank = self._rank_of(source)
            if rank not in unknown and not self._receive(action, rank):
                unknown.add(rank)

    def _source_of(self, action: Action) -> int | None:
        """Returns the stage that sends the inputs of a pass; None if no stage does."""
        kind, stage, _ = action
        if kind == "forward":
            return stage - 1 if stage else None
        return stage + 1 if kind != "weight gradient" and stage < self._last else None

    def _receive(self, action: Action, rank: int) -> bool:
        """Starts to receive; returns False if the shape is not known yet."""
        kind, stage, micro = action
        if kind == "forward":
            if stage not in self._forms:
                return False
            form = self._forms[stage]
            shape = (self._samples[micro], *form.shape)
            name = f"pipeline.{stage}"
            tag = _tag(stage, backward=False)
            self._coming[action] = self._messages.start_recv(shape, form.dtype, rank, name, tag)
            return True
        if (stage, micro) not in self._passes:
            return False
        like = self._passes[stage, micro].outputs
        name = f"pipeline.{stage + 1}.gradient"
        tag = _tag(stage + 1, backward=True)
        shape = tuple(like.shape)
        self._coming[action] = self._messages.start_recv(shape, like.dtype, rank, name, tag)
        return True

    def forward(
        self,
        action: Action,
        inputs: Callable[[], torch.Tensor],
        finish: Callable[[Any], Any],
        backward: bool,
    ) -> None:
        _, stage, micro = action
        if stage and stage not in self._forms:
            found = self._ranks.start_recv(
                np.empty(MOST_AXES + 2, np.int64),
                self._rank_of(stage - 1),
                f"pipeline.{stage}.form",
                _tag(stage),
            )
            self._forms[stage] = _ActivationSpec.of_numbers(self._wait(found, stage - 1))
            self.prepare([action])
        x = self._wait(self._coming.pop(action), stage - 1) if stage else inputs()
        passes = MicroBatch(self._stages[stage], x, is_first=stage == 0)
        self._messages.flush()
        if stage == self._last:
            passes.outputs = finish(passes.outputs)
        else:
            self._send_outputs(stage, micro, passes.outputs)
        if backward:
            self._passes[stage, micro] = passes

    def _send_outputs(self, stage: int, micro: int, outputs: torch.Tensor) -> None:
        to = self._rank_of(stage + 1)
        tag = _tag(stage + 1)
        name = f"pipeline.{stage + 1}"
        if not micro:
            self._gradients.append(
                (
                    self._ranks.start_send(
                        _ActivationSpec.of(outputs).numbers(), to, f"{name}.form", tag
                    ),
                    stage + 1,
                )
            )
        self._outputs[stage, micro] = self._messages.start_send(outputs, to, name, tag)

    def backward(self, action: Action) -> None:
        kind, stage, micro = action
        passes = self._passes[stage, micro]
        if kind == "weight gradient":
            passes.weight_gradient()
        else:
            gradient = None
            if stage < self._last:
                gradient = self._wait(self._coming.pop(action), stage + 1)
                # wait until they have arrived
                self._wait(self._outputs.pop((stage, micro)), stage + 1)
            own = (
                passes.backward(gradient) if kind == "backward" else passes.input_gradient(gradient)
            )
            self._messages.flush()
            if stage:
                to = self._rank_of(stage - 1)
                name = f"pipeline.{stage}.gradient"
                self._gradients.append(
                    (
                        self._messages.start_send(own, to, name, _tag(stage, backward=True)),
                        stage - 1,
                    )
                )
        if kind != "input gradient":
            del self._passes[stage, micro]

    def finish(self) -> None:
        """Waits until everything has arrived."""
        self.under_way = CurrentPass("the end of all passes", None)
        self._messages.flush()
        for (stage, _), handle in self._outputs.items():
            self._wait(handle, stage + 1)
        for handle, stage in self._gradients:
            self._wait(handle, stage)

    def _wait(self, handle: Handle, stage: int) -> Any:
        """Waits for a message from or to the stage."""
        assert self.under_way is not None
        self._messages.flush()
        before = self.under_way
        began = self._times.mark()
        self._enter("communication")
        self.under_way = before._replace(
            text=f"{before.text}, waits for stage {stage}", waits_for=self._rank_of(stage)
        )
        received = handle.wait()
        self.under_way = before
        self._enter(self._phase)
        self.waits.append(Between(began, self._times.mark()))
        return received

    def _rank_of(self, stage: int) -> int:
        return stage % self._ranks.size


class _ActivationSpec(NamedTuple):
    """Dtype and shape of one sample of a stage's output; sent before the first micro-batch of a
    step."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, outputs: Any) -> _ActivationSpec:
        assert isinstance(outputs, torch.Tensor), (
            f"a stage gives one tensor to the next one, not {type(outputs).__name__}"
        )
        return cls(outputs.dtype, tuple(outputs.shape[1:]))

    @classmethod
    def of_numbers(cls, numbers: np.ndarray) -> _ActivationSpec:
        return cls(DTYPES[numbers[0]], tuple(int(n) for n in numbers[2 : 2 + numbers[1]]))

    def numbers(self) -> np.ndarray:
        row = np.zeros(MOST_AXES + 2, np.int64)
        row[: 2 + len(self.shape)] = [DTYPES.index(self.dtype), len(self.shape), *self.shape]
        return row


@torch.no_grad()
def planned_forms(
    model: torch.nn.Module, first: Sequence[int], x: torch.Tensor, autocast: Autocast
) -> dict[str, np.ndarray]:
    """Returns, by name, the messages that announce shapes to a stage."""
    forms = {}
    for number, unit in enumerate(units_of(model, "parallel.pipeline")):
        if number in first[1:]:
            forms[f"pipeline.{list(first).index(number)}.form"] = _ActivationSpec.of(x).numbers()
        with autocast(x.device):
            x = unit.call(x)
    return forms


def _tag(stage: int, *, backward: bool = False) -> int:
    """Returns the tag of messages into a stage, or of the gradients of its inputs."""
    return 1 + 2 * stage + backward


class _Alias(torch.autograd.Function):
    """Returns a tensor with the memory of x that units may change in place, as
    nn.ReLU(inplace=True) does: neither a leaf nor a view of one."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.data

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class MicroBatch:
    """A micro-batch in a stage, between its forward and its last backward pass; it holds the
    activations."""

    def __init__(self, stage: Stage, x: torch.Tensor, is_first: bool) -> None:
        """x: (n, ...), the inputs of the model, which need no gradient, or the outputs of the
        previous stage."""
        self._x = x.detach().requires_grad_(torch.is_grad_enabled() and not is_first)
        # where backward() starts; in the last stage the loss replaces it
        self.outputs: Any = stage(_Alias.apply(self._x))
        self._parameters = [p for p in stage.parameters() if p.requires_grad]
        self._groups: list[
            dict[str, Any]
        ] = []  # torch's: of parameters, with the gradients that reach them

    def backward(self, gradient: torch.Tensor | None) -> torch.Tensor:
        """Adds to p.grad and returns the gradient of x. `gradient` is the gradient of the outputs,
        None for a loss."""
        if self.outputs.requires_grad:
            torch.autograd.backward(self.outputs, gradient)
        return self._gradient_of_x()

    def input_gradient(self, gradient: torch.Tensor | None) -> torch.Tensor:
        """Computes only the gradient of x, for which the previous stage waits."""
        if self.outputs.requires_grad:
            gradients = None if gradient is None else [gradient]
            _, self._groups = stage_backward_input(
                [self.outputs], gradients, [self._x], iter(self._parameters)
            )
        return self._gradient_of_x()

    def weight_gradient(self) -> None:
        """Computes the rest of backward(): adds to p.grad."""
        stage_backward_weight(iter(self._parameters), self._groups)

    def _gradient_of_x(self) -> torch.Tensor:
        """Returns the gradient of x, zeros if nothing depends on it."""
        self.outputs = None
        return torch.zeros_like(self._x) if self._x.grad is None else self._x.grad
