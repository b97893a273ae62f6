"""Context: gives a script's custom loop the features of the trainer."""

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
    """One rank of a script's custom loop. hvdtrain.init() creates it; every rank makes the same
    calls in the same order.

    The loop: prepare(), resume(), then for each batch of samples(): backward(loss),
    optimizer.step(), log(), checkpoint(), should_stop; at the end close(). Calls raise UserError if
    something is not possible; an exception that the script does not catch ends all ranks.
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
        """closing: resources closed last; they see the exception that ended the loop, if any.

        ranks: only if the survivors of a loss continue; former: the state they continue from. A
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
        """This rank's device, as an object of the framework: model.to(ctx.device) before
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

    @overload
    def prepare(
        self, model: Any, optimizer: Any, *, example: Any = None, name: str | None = None
    ) -> tuple[Any, Any]: ...
    @overload
    def prepare(self, model: Any, *, name: str) -> Any: ...
    def prepare(
        self, model: Any, optimizer: Any = None, *, example: Any = None, name: str | None = None
    ) -> Any:
        """Wraps a torch module and its optimizer so that all ranks train them together. Use the
        returned ones instead of your own.

        With framework=jax: a tree of arrays and a transformation of optax's kind; returns the tree
        on this rank's device and the transformation's initial state. Pass them to value_and_grad()
        and update().

        The keys comm.* and shard.* select how gradients are reduced: in buckets, by Horovod's
        optimizer, DDP, or sharded (ZeRO 1 to 3); parallel.* partitions the model. Weights and
        buffers of rank 0 are broadcast. Call it once, before the first step, with an optimizer that
        has no state. example: a tensor (n, ...), the model's input for some samples, or a dict of
        several: parallel.tensor and parallel.pipeline need it, and shard.stage=3 with
        speed.precision=bf16 or fp16.

        name: for several models that step in turn, such as a GAN's, a name for each; checkpoints
        have it. Gradients then stay on their rank until the optimizer steps, so that there may be
        several backward() before it. With a name and without an optimizer the model is not trained;
        only the model is returned.
        """
        return self._loop.prepare(model, optimizer, example, name, self._batches.stepped)

    @overload
    def resume(self) -> dict[str, Any]: ...
    @overload
    def resume(self, params: Any, state: Any, /) -> tuple[Any, Any, dict[str, Any]]: ...
    def resume(self, *prepared: Any) -> Any:
        """Resumes from the newest good checkpoint of run= or resume=: model, optimizer and data
        position, on every rank.

        Returns the extra values that checkpoint() saved; an empty mapping if there is no
        checkpoint. The number of ranks may differ. With framework=jax it takes what prepare()
        returned, and returns params, state and the extra values from the checkpoint.
        """
        return self._saving.resume(prepared)

    def samples(
        self, dataset: Any, *, batch: int, epochs: float = 1.0, seed: int | None = None
    ) -> Iterator[Any]:
        """Yields this rank's share of each batch, from the loop's current position. batch["x"] is a
        tensor (n, ...); `x, y = batch` unpacks the fields in order.

        dataset: a dict of arrays, a torch Dataset, or another kind from docs/own-data.md. batch:
        its size over all ranks, whose shares differ by at most 1. The order of samples depends only
        on the seed (default: the configuration's), not on the number of ranks; each sample comes
        once in an epoch. The loop ends after `epochs`, or when should_stop is true. If a batch is
        smaller than the number of ranks, a rank without samples gets one that does not count
        (batch.count is 0).
        """
        return self._batches.samples(dataset, batch=batch, epochs=epochs, seed=seed)

    def each(self, dataset: Any, *, batch: int) -> Iterator[Any]:
        """Yields every sample once over all ranks, in batches of at most `batch` per rank. For an
        evaluation, within the loop or after it.

        Every rank gets the same number of batches; a rank without samples gets one that does not
        count. Use mean(..., count=batch.count); inside the loop this is the default count.
        """
        return self._batches.each(dataset, batch=batch)

    def backward(self, loss: Any, *, count: Any = None, retain_graph: bool = False) -> None:
        """Runs the backward pass. `loss` is a tensor of one number: the mean over this rank's
        samples of the batch, or over `count` items.

        The loss is weighted with this rank's share, so p.grad becomes the gradient of the mean over
        the batch of all ranks, even if shares are uneven. With shard.stage each rank holds a part
        of it, outside of p.grad. Call it once for each batch, or with several models as often as in
        plain torch. A collective.

        count: the number of this rank's items (tokens, labelled pixels, the sum of class weights);
        a rank with 0 adds nothing. If the loss is not a mean over samples, pass it in every step on
        every rank; with data.pad it is required. retain_graph: as in torch, with several models.
        """
        self._loop.need("ctx.backward()")
        self._loop.learner.backward(loss, count, retain_graph=retain_graph)

    def accumulate(self, loss_of: Callable[[Any], Any], *, at_most: int) -> Any:
        """Accumulates gradients: runs backward() on parts of at most `at_most` samples, to save
        memory.

        loss_of(part): runs a forward pass and returns the mean loss over part["x"], ...; called
        equally often on all ranks. If the mean is not over samples it returns (loss, count), see
        backward(). Returns this rank's mean loss.
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
        """framework=jax: jax.value_and_grad(loss_of) over the samples of all ranks: a function with
        the arguments of loss_of.

        loss_of(params, ...) returns the mean over this rank's samples of the batch; with has_aux, a
        pair of the mean and any other value. The function returns this rank's loss, or the pair,
        and the gradient of the mean over the batch of all ranks, even if shares are uneven: a tree
        like params. at_most: splits the batch into parts of at most so many samples, to save
        memory; loss_of then takes the batch. has_count: loss_of returns (loss, count), with has_aux
        (loss, count, anything): the loss is the mean over `count` items, such as tokens or labelled
        pixels, and the gradient is of the mean over the items of all ranks and parts; with data.pad
        it is required. loss_of is compiled once for each shape. Call the function once for each
        batch. A collective.
        """
        self._loop.need("ctx.value_and_grad()")
        if at_most is not None:
            check_batch(at_most, "ctx.value_and_grad()", "at_most", "samples of a part, 1 or more")
        function: Callable[..., Any] = self._loop.learner.value_and_grad(
            loss_of, has_aux=has_aux, has_count=has_count, at_most=at_most
        )
        return function

    def grad(
        self,
        loss_of: Callable[..., Any],
        *,
        has_aux: bool = False,
        has_count: bool = False,
        at_most: int | None = None,
    ) -> Callable[..., Any]:
        """framework=jax: value_and_grad() without the loss; with has_aux the function returns a
        pair of the gradient and the other value."""
        of_both = self.value_and_grad(
            loss_of, has_aux=has_aux, has_count=has_count, at_most=at_most
        )

        def gradient_of(params: Any, *arguments: Any) -> Any:
            value, gradient = of_both(params, *arguments)
            return (gradient, value[1]) if has_aux else gradient

        return gradient_of

    def update(self, gradient: Any, state: Any, params: Any, **extra: Any) -> tuple[Any, Any]:
        """framework=jax: applies the transformation, once for each batch, and returns new params
        and state.

        gradient: what grad() returned, unchanged; state, params: from the previous step. Clips by
        optim.clip_norm and optim.clip_value first. extra: further arguments of the transformation's
        update, the same on all ranks: value=...
        """
        self._loop.need("ctx.update()")
        updated: tuple[Any, Any] = self._loop.learner.update(gradient, state, params, extra)
        return updated

    def mean(self, metrics: Mapping[str, Any], count: Any = None) -> dict[str, float]:
        """Averages this rank's means over all ranks, by name. The result is the same on every rank.
        A collective.

        count: the number of samples or items that this rank's values are means over. Default: the
        count of the batch's loss, or its samples; outside of a batch, 1. Required after ctx.each(),
        and inside it with data.pad. NaN if no rank has any samples. Raises UserError on every rank
        if names differ between ranks, and for a value that is not a mean.
        """
        return self._batches.mean(metrics, count)

    def log(self, **values: Any) -> None:
        """Logs numbers of this rank: means over its samples, or over the count of its loss.

        The event "step" of the next sync point contains their means over ranks and steps. The event
        "epoch", written when the loop asks for the next batch, contains the means of the whole
        epoch. `lr` becomes the learning rate of the events.

        Device scalars do not make the host wait. The events go to the run folder's events.jsonl,
        the terminal, log.trackers and reports, which draw `loss`. Names must be the same on every
        rank.
        """
        self._loop.need("ctx.log()")
        self._loop.points.add(values, self._batches.count("ctx.log()"))

    def checkpoint(
        self,
        model: Any = None,
        optimizer: Any = None,
        *,
        now: bool = False,
        objective: Any = None,
        better: Better = "min",
        **extra: Any,
    ) -> bool:
        """Writes a checkpoint in the background if one is due: by checkpoint.every_steps or
        every_minutes, before a stop, or at the end.

        model, optimizer: the ones that prepare() returned, or the params and state of update(). Not
        needed with several models: a checkpoint has all of them.
        extra: values that resume() is to return (plain values, arrays, tensors, objects with
        state_dict()); rank 0's are saved. now: writes one at this step in any case, and keeps it
        regardless of checkpoint.keep_last. objective: the value of an evaluation at this step; rank
        0's value counts, and better="max" if more is better. The checkpoint is then written in any
        case, and kept while it is among the checkpoint.keep_best best. Returns whether one is
        written; at a stop and at the end, once it is on disk. A checkpoint is complete or absent.
        Every rank calls it in every step, after optimizer.step() and before should_stop. If a loop
        stops without it, close() writes the checkpoint with the objects of the last call, unless
        that included plain values.
        """
        return self._saving.checkpoint(
            model, optimizer, now=now, objective=objective, better=better, extra=extra
        )

    @property
    def should_stop(self) -> bool:
        """Whether the loop has to stop, to be resumed later: after a signal to any rank, or at
        guard.max_time. The same on all ranks at each step.

        It changes every log.every_steps steps. Every rank reads it after optimizer.step().
        """
        return self._loop.should_stop

    def close(self) -> int:
        """Ends the loop on every rank: waits until a pending checkpoint and events are written.
        Also called at the script's end.

        Returns the exit code: 0, or 75 if the loop was stopped to be resumed.
        `sys.exit(ctx.close())` passes it to the launcher.
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
        """Ends the loop after an exception. On several ranks it is reported and all ranks exit;
        with one rank it is left to the script."""
        self._ending.fail(error)

    # hvdtrain.run() calls the following when another rank is lost.

    def give_up(self) -> None:
        """Stops readers and writers on this rank after another rank was lost, without waiting for
        pending work."""
        self._ending.give_up()

    def former(self, loss: RankFailure, began_s: float) -> Former:
        """Returns the state from which surviving ranks continue after this loss."""
        loop = self._loop
        return Former(self.run or Path(), loop.run.token, loop.model, loss, began_s)

    @property
    def untold_loss(self) -> RankFailure | None:
        """The loss that led to this loop, until the loop has reported it with an event."""
        return self._loop.untold_loss
