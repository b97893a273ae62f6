"""Context: the calls with which a script's own loop has what the trainer has, made of the trainer's
own objects."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, overload

from hvdtrain.comm.communicator import Elastic
from hvdtrain.comm.mesh import Mesh
from hvdtrain.context.batches import Batches
from hvdtrain.context.ending import Ending
from hvdtrain.context.loop import ScriptLoop
from hvdtrain.context.open_run import Former
from hvdtrain.context.saving import Saving
from hvdtrain.context.stream import check_batch
from hvdtrain.core.metrics import Better
from hvdtrain.training.lost import RankFailure
from hvdtrain.training.run_rank import ConnectedRank


class Context:
    """One rank of a script's own loop. hvdtrain.init() makes it; every rank makes the same calls in
    the same order.

    The loop: prepare(), resume(), then for each batch of samples(): backward(loss),
    optimizer.step(), log(), checkpoint(), should_stop; at the end close(). Calls raise UserError
    where something cannot be; an exception that the script does not catch ends all ranks.
    """

    rank: int  # of this process, from 0
    size: int  # ranks
    local_rank: int  # among the ranks of this host
    local_size: int
    mesh: Mesh  # the groups of ranks: mesh.world is the communicator of all
    hosts: list[str]  # of each rank
    run: Path | None  # the run folder, as rank 0 knows it

    def __init__(
        self,
        rank: ConnectedRank,
        closing: contextlib.ExitStack,
        ranks: Elastic | None = None,
        former: Former | None = None,
    ) -> None:
        """closing: what is closed last, with the exception that ended the loop, if one did.

        ranks: where the others go on without one that is lost; former: what they go on from then. A
        collective.
        """
        loop = ScriptLoop(rank, closing, ranks, former)
        self._loop = loop
        self._batches = Batches(loop)
        self._saving = Saving(loop)
        self._ending = Ending(loop, self._saving, closing)
        self.rank = rank.communicator.rank
        self.size = rank.communicator.size
        self.local_rank = rank.communicator.local_rank
        self.local_size = rank.communicator.local_size
        self.mesh = loop.mesh
        self.hosts = loop.hosts
        self.run = loop.run.path

    @property
    def device(self) -> Any:
        """The device of this rank, as the framework has it: model.to(ctx.device) before
        prepare()."""
        return self._loop.framework.device(self._loop.config, self._loop.communicator)

    @property
    def step(self) -> int:
        """Steps done."""
        return self._loop.step

    @property
    def epochs(self) -> float:
        """Epochs of the samples done, with the fraction."""
        return self._loop.epochs

    def prepare(self, model: Any, optimizer: Any, *, example: Any = None) -> tuple[Any, Any]:
        """A torch module and its optimizer, as all ranks train them together: both in the place of
        the script's own.

        With framework=jax: a tree of arrays and a transformation of optax's kind; returns the tree
        on this rank's device and the state that the transformation begins with, which
        value_and_grad() and update() take.

        Gradients are reduced as comm.* and shard.* say: in buckets, by Horovod's optimizer, DDP, or
        sharded (ZeRO 1 to 3); with parallel.* ranks have the model together. Weights and buffers of
        rank 0 are sent to all as data. Once, before the first step, with an optimizer that has no
        state. example: a tensor (n, ...), what the model is called with for some samples, or a dict
        of several: parallel.tensor and parallel.pipeline need it, and shard.stage=3 with
        speed.precision=bf16 or fp16.
        """
        return self._loop.prepare(model, optimizer, example, self._batches.stepped)

    @overload
    def resume(self) -> dict[str, Any]: ...
    @overload
    def resume(self, params: Any, state: Any, /) -> tuple[Any, Any, dict[str, Any]]: ...
    def resume(self, *prepared: Any) -> Any:
        """Goes on from the newest good checkpoint of run=, or of resume=: model, optimizer, and the
        place in the samples, on every rank.

        Returns what checkpoint() was given beside them; an empty mapping where there is no
        checkpoint. The number of ranks may be another. With framework=jax it takes what prepare()
        returned, and returns it as the checkpoint has it: params, state, kept.
        """
        return self._saving.resume(prepared)

    def samples(
        self, dataset: Any, *, batch: int, epochs: float = 1.0, seed: int | None = None
    ) -> Iterator[Any]:
        """This rank's share of each batch, from where the loop is: batch["x"] are tensors (n, ...),
        `x, y = batch` has them in order.

        dataset: a dict of arrays, a torch Dataset, or what else docs/own-data.md lists. batch: over
        all ranks, of which shares differ by at most 1. The same samples in the same order on any
        number of ranks, each once in an epoch, as a function of the seed alone (default: the
        configuration's). The loop ends after `epochs`, and where should_stop is true. A rank
        without samples, in a batch that is smaller than the number of ranks, gets one that does not
        count (batch.count is 0).
        """
        return self._batches.samples(dataset, batch=batch, epochs=epochs, seed=seed)

    def each(self, dataset: Any, *, batch: int) -> Iterator[Any]:
        """Every sample once, over all ranks, in batches of at most `batch` on each: for an
        evaluation, within the loop or after it.

        Every rank gets equally many batches; one without samples has one that does not count:
        mean(..., count=batch.count), which inside of the loop is what a mean without a count has.
        """
        return self._batches.each(dataset, batch=batch)

    def backward(self, loss: Any, *, count: Any = None) -> None:
        """The backward pass: `loss` is the mean over this rank's samples of the batch, or over
        `count` items, a tensor of one number.

        It is weighted with this rank's share, so that p.grad is then the gradient of the mean over
        the batch of all ranks, with uneven shares too. With shard.stage each rank has a part of
        that, outside of p.grad. Once for each batch. A collective.

        count: of this rank's items (tokens, labelled pixels, the sum of class weights), 0 where it
        has none, which then adds nothing. Where the mean of the loss is not over samples, every
        step on every rank has it; with data.pad it is required.
        """
        self._loop.need("ctx.backward()")
        self._loop.learner.backward(loss, count)

    def accumulate(self, loss_of: Callable[[Any], Any], *, at_most: int) -> Any:
        """Gradient accumulation: backward() in parts of at most so many samples, of which each
        needs memory by itself.

        loss_of(part): a forward pass, the mean loss over part["x"], ...; called equally often on
        all ranks. Where the mean is not over samples it returns (loss, count), as backward() has
        them. Returns this rank's mean loss.
        """
        self._loop.need("ctx.accumulate()")
        check_batch(at_most, "ctx.accumulate()", "at_most", "samples of a part, 1 or more")
        return self._loop.learner.accumulate(loss_of, at_most)

    def value_and_grad(
        self,
        loss_of: Callable[..., Any],
        *,
        has_aux: bool = False,
        has_count: bool = False,
        at_most: int | None = None,
    ) -> Callable[..., Any]:
        """framework=jax: jax.value_and_grad(loss_of) over the samples of all ranks: a function of
        params and what else loss_of takes.

        loss_of(params, ...) is the mean over this rank's samples of the batch; with has_aux it
        returns a pair of that and anything. The function returns this rank's loss, or the pair, and
        the gradient of the mean over the batch of all ranks, with uneven shares too: a tree like
        params. at_most: in parts of at most so many samples, of which each needs memory by itself;
        loss_of then takes the batch. has_count: loss_of returns (loss, count), with has_aux (loss,
        count, anything): the loss is the mean over `count` items, as tokens or labelled pixels, and
        the gradient that of the mean over the items of all ranks and parts; with data.pad it is
        required. loss_of is compiled, once for each shape. Once for each batch. A collective.
        """
        self._loop.need("ctx.value_and_grad()")
        if at_most is not None:
            check_batch(at_most, "ctx.value_and_grad()", "at_most", "samples of a part, 1 or more")
        found: Callable[..., Any] = self._loop.learner.value_and_grad(
            loss_of, has_aux=has_aux, has_count=has_count, at_most=at_most
        )
        return found

    def grad(
        self,
        loss_of: Callable[..., Any],
        *,
        has_aux: bool = False,
        has_count: bool = False,
        at_most: int | None = None,
    ) -> Callable[..., Any]:
        """framework=jax: value_and_grad() without the loss; with has_aux its function gives a pair
        of the gradient and the other value."""
        of_both = self.value_and_grad(
            loss_of, has_aux=has_aux, has_count=has_count, at_most=at_most
        )

        def gradient_of(params: Any, *arguments: Any) -> Any:
            value, gradient = of_both(params, *arguments)
            return (gradient, value[1]) if has_aux else gradient

        return gradient_of

    def update(self, gradient: Any, state: Any, params: Any, **extra: Any) -> tuple[Any, Any]:
        """framework=jax: the step of the transformation, once for each batch: new params and state.

        gradient: what grad() has returned, as it is; state, params: those of the step before. It
        clips by optim.clip_norm and optim.clip_value first. extra: further arguments of the
        transformation's update, the same on all ranks: value=...
        """
        self._loop.need("ctx.update()")
        found: tuple[Any, Any] = self._loop.learner.update(gradient, state, params, extra)
        return found

    def mean(self, metrics: Mapping[str, Any], count: Any = None) -> dict[str, float]:
        """Means over all ranks of this rank's means, by name, the same on every rank. A collective.

        count: samples, or items, that this rank's values are means of. Without it what the batch
        has: the count of its loss, or its samples; outside of a batch 1. After ctx.each() it is
        required, and inside with data.pad. NaN where no rank has any. Raises UserError where they
        give different names, on every rank, and for what is no mean.
        """
        return self._batches.mean(metrics, count)

    def log(self, **values: Any) -> None:
        """Numbers of this rank, as means over its samples, or over the count of its loss.

        The event "step" of the next sync point has their means over ranks and steps, the event
        "epoch" those of the whole epoch, when the loop asks for the batch after it. `lr` is the
        rate that events have.

        Device scalars cost no wait. The events go to the run folder's events.jsonl, the terminal,
        log.trackers and reports, which draw `loss`. The same names on every rank.
        """
        self._loop.need("ctx.log()")
        self._loop.points.add(values, self._batches.count("ctx.log()"))

    def checkpoint(
        self,
        model: Any,
        optimizer: Any,
        *,
        now: bool = False,
        objective: Any = None,
        better: Better = "min",
        **extra: Any,
    ) -> bool:
        """Writes a checkpoint, in the background, where one is due: checkpoint.every_steps,
        every_minutes, before a stop, at the end.

        model, optimizer: those of prepare(), or the params and state of update(). extra: what
        resume() is to return: plain values, arrays, tensors, objects with state_dict(); rank 0's
        count. now: in any case, at this step, and kept whatever checkpoint.keep_last is. objective:
        the value of an evaluation at this step, a number of which rank 0's counts, and better="max"
        where more is better: it is written in any case, and one of the checkpoint.keep_best best is
        kept. Returns whether one is written; at a stop and at the end once it is on the disk. It is
        complete or absent. Every rank calls it, after optimizer.step(): in every step, before
        should_stop. Where a loop stops without it close() writes the checkpoint with the objects of
        the last call, unless that had plain values too.
        """
        return self._saving.checkpoint(
            model, optimizer, now=now, objective=objective, better=better, extra=extra
        )

    @property
    def should_stop(self) -> bool:
        """Whether the loop is to be stopped and resumed later: a signal to any rank,
        guard.max_time. The same on all ranks at each step.

        It changes every log.every_steps steps. Every rank reads it, after optimizer.step().
        """
        return self._loop.should_stop

    def close(self) -> int:
        """Ends the loop on every rank: waits for a checkpoint that is written, and for events. A
        script's end calls it, too.

        Returns the exit code: 0, or 75 where the loop was stopped to be resumed.
        `sys.exit(ctx.close())` tells it to the launcher.
        """
        return self._ending.close()

    def __enter__(self) -> Context:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None or (isinstance(error, SystemExit) and not error.code):
            self.close()
        else:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """The loop ended by an exception: on several ranks it is reported and all end; on one it is
        the script's again."""
        self._ending.fail(error)

    # What hvdtrain.run() asks for when another rank is lost.

    def give_up(self) -> None:
        """Ends on this rank what reads and writes, after the loss of another one: what is under way
        is not waited for."""
        self._ending.give_up()

    def former(self, loss: RankFailure, began_s: float) -> Former:
        """What the ranks that are left go on from after this loss."""
        loop = self._loop
        return Former(self.run or Path(), loop.run.token, loop.model, loss, began_s)

    @property
    def untold_loss(self) -> RankFailure | None:
        """The loss before this loop, until the loop has begun, with an event."""
        return self._loop.untold_loss
