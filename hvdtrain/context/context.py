"""Context: the calls with which a script's own loop has what the trainer has, made of the trainer's
own objects."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, overload

from hvdtrain.comm.communicator import Elastic
from hvdtrain.comm.mesh import Mesh, make_mesh
from hvdtrain.comm.on_all_ranks import allreduce_sums, on_rank_0
from hvdtrain.context import own_events
from hvdtrain.context.logged import check_mean, check_same_names, names_fingerprint, quotient
from hvdtrain.context.saved import IDENTITY, Restored, WithExtra, decoded, evaluated, restore
from hvdtrain.context.settings import described
from hvdtrain.context.stream import Order, SampleStream, check_batch, checked_source, rows_of
from hvdtrain.context.sync_points import SyncPoints
from hvdtrain.core.metrics import Better, Sums, scalar
from hvdtrain.core.own_line import own_frame
from hvdtrain.core.progress import Progress
from hvdtrain.data.sampler import evaluation_batches
from hvdtrain.errors import DONE, UserError
from hvdtrain.events.log import CLOSE_S
from hvdtrain.events.rank_log import rank_log
from hvdtrain.frameworks.extra import MOST_BYTES
from hvdtrain.frameworks.own_loop import Divisor, Words, item_count, module_of
from hvdtrain.training.checkpoint import files
from hvdtrain.training.checkpoint.checkpoints import Checkpoints
from hvdtrain.training.checkpoint.resume import former_run
from hvdtrain.training.checkpoint.room import cannot_write
from hvdtrain.training.job import make_health, make_saver
from hvdtrain.training.progress.train_state import TrainState
from hvdtrain.training.replicas.compare import broadcast_state
from hvdtrain.training.run_folder import check_run_folder, open_run_folder, write_config
from hvdtrain.training.run_rank import Rank
from hvdtrain.training.sync_point import HASTY_S, close_all, fail, write_last_checkpoint
from hvdtrain.training.train_job import open_run_log

if TYPE_CHECKING:  # with guard.lost
    from hvdtrain.training.elastic_job import Loss

_SPARE_BYTES = 2**20  # of a checkpoint's file, beside arrays


class Former(NamedTuple):
    """What the ranks that are left after a loss go on from."""

    run: Path
    token: str  # of the lock of the run folder
    model: weakref.ref[Any]  # that was prepared
    loss: Loss
    began_s: float  # by time.perf_counter(), when this rank had the error of the loss


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
    run: Path | None  # the run folder, as rank 0 knows it

    def __init__(
        self,
        rank: Rank,
        closing: contextlib.ExitStack,
        ranks: Elastic | None = None,
        former: Former | None = None,
    ) -> None:
        """closing: what is closed last, with the exception that ended the loop, if one did.

        ranks: where the others go on without one that is lost; former: what they go on from then. A
        collective.
        """
        self._ranks = ranks
        self._former_loop = former
        self._script: Any = module_of(rank.config.framework, "script")
        self._script.begin(rank.config, rank.communicator)
        # until the loop has begun, with an event
        self.untold_loss = None if former is None else former.loss
        self._config = rank.config
        self._communicator = rank.communicator
        self._closing = closing
        self._heartbeat = rank.heartbeat
        self._signals = rank.signals
        self._lock = rank.lock
        self._reason = rank.engine_reason
        self.mesh = make_mesh(rank.communicator, rank.config)
        self.rank = rank.communicator.rank
        self.size = rank.communicator.size
        self.local_rank = rank.communicator.local_rank
        self.local_size = rank.communicator.local_size
        self.hosts: list[str] = rank.communicator.allgather_object(socket.gethostname())
        self.run, self._former, self._notes = on_rank_0(rank.communicator, self._open_run)
        # the moving display is of hvdtrain's own loop
        lines = rank.config.replace(log=rank.config.log.replace(display="lines"))
        self._log = open_run_log(lines, rank.communicator, self.run, rank.lock)
        per_rank = rank.config.log.per_rank and self.run is not None
        self._files = closing.enter_context(contextlib.ExitStack())
        self._files.enter_context(
            rank_log(
                Path(self.run or "") / "ranks" / f"rank-{self.rank:05d}.log" if per_rank else None
            )
        )
        # of the lock that another rank 0 takes over
        self.token = on_rank_0(rank.communicator, lambda: self._lock.token) if ranks else ""
        self._learner: Any = None
        # that was prepared last, once one was
        self.model: weakref.ref[Any] = weakref.ref(self) if former is None else former.model
        self._order: Order | None = None  # of the samples, by the checkpoint or by samples()
        self._stream: SampleStream | None = None
        self._samples: Any = None  # the batch that the script has
        self._evaluated: Any = None  # the batch of ctx.each() that it has
        self._is_evaluated = False  # ctx.each() is over, and no batch of samples() has come since
        self._resumed = self._checked_extra = self._closed = False
        self._failure = ""  # why the last checkpoint is not written
        self._extra: dict[str, Any] | None = (
            None  # what the script has given for its checkpoints the last time
        )
        self._written_step = -1  # of the newest checkpoint of this loop

    def _open_run(self) -> tuple[Path | None, Path | None, list[str]]:
        """On rank 0: the run folder, locked; the one to go on from; lines for the user."""
        if self._former_loop is not None:
            return self._open_same_run(self._former_loop)
        if self._config.run is None:
            if self._config.resume not in ("auto", "no"):
                raise UserError(
                    "resume= needs run=",
                    self._config.where("resume"),
                    "run=DIR, where this script writes",
                )
            return None, None, []
        former = former_run(self._config)
        run, notes = open_run_folder(self._config, self._lock)
        check_run_folder(run, 0)
        return run, former, notes

    def _open_same_run(self, former: Former) -> tuple[Path, Path | None, list[str]]:
        """What _open_run() returns, where ranks were lost, of which one may have had the lock."""
        if not self._lock.is_held:
            try:
                self._lock.take_over(former.run, former.token)
            except OSError as error:
                raise cannot_write(error, self._config.where("run")) from None
        check_run_folder(former.run, 0)
        return (
            former.run,
            former.run if files.finished(former.run) else former_run(self._config),
            [],
        )

    @property
    def _is_new(self) -> bool:
        """Whether nothing was written in the run folder before."""
        return self.run is not None and (
            self._former is None or self._former.resolve() != self.run.resolve()
        )

    def _write_config(self) -> None:
        """config.yaml, on rank 0. Raises OSError."""
        assert self.run is not None and self._stream is not None
        write_config(self._stream.config, self.run, self._lock, described())

    def _write_first_files(self) -> None:
        """Writes the first files of the run folder. Raises UserError, as on a full disk."""
        try:
            self._write_config()
        except OSError as error:
            raise cannot_write(error, self._config.where("run")) from None

    @property
    def device(self) -> Any:
        """The device of this rank, as the framework has it: model.to(ctx.device) before
        prepare()."""
        return self._script.pick_device(self._config, self._communicator)

    @property
    def _words(self) -> Words:
        words: Words = self._script.WORDS
        return words

    @property
    def _extra_values(self) -> Any:
        """The module that puts what the script keeps into a checkpoint."""
        return module_of(self._config.framework, "extra")

    @property
    def step(self) -> int:
        """Steps done."""
        return 0 if self._learner is None else self._points.now.progress.step

    @property
    def epochs(self) -> float:
        """Epochs of the samples done, with the fraction."""
        return 0.0 if self._learner is None else self._points.now.progress.epochs

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
        if self._learner is not None:
            raise UserError("a second ctx.prepare()", "ctx.prepare()", self._words.one)
        former = self.model()
        if former is not None and any(
            former is one for one in (model, getattr(model, "_orig_mod", None))
        ):
            what = "a model that was prepared before a rank was lost"
            raise UserError(
                what,
                "ctx.prepare()",
                "make the model and the optimizer inside of the function that hvdtrain.run() calls",
            )
        self._heartbeat.beat("preparing the model", 0, 0)
        own_learner = module_of(self._config.framework, "own_learner")
        learner = own_learner.build(
            self._config, self.mesh, model, optimizer, self._stepped, example
        )
        self._heartbeat.under_way = learner.under_way
        broadcast_state(self._communicator, learner, None)
        self._learner = learner
        self._saved = WithExtra(learner)
        self.model = weakref.ref(learner.user_model)
        config = self._config
        run = self.run
        saver = None
        self._limit_bytes = (
            _SPARE_BYTES + MOST_BYTES + 8 * sum(piece.nbytes for piece in learner.pieces())
        )
        beginning = TrainState(Progress(1, 1), sums={"loss": 0.0, "count": 0})
        if run is not None and self.rank == 0:
            # of a new run samples() has written it
            record = None if self._is_new else self._write_config
            saver = make_saver(
                config,
                IDENTITY,
                self._log,
                beginning,
                run,
                self._limit_bytes,
                record,
                self._lock.open,
            )
        checkpoints = Checkpoints(
            self._communicator,
            self._saved,
            run or Path(),
            self._limit_bytes,
            saver,
            self.hosts,
            self._heartbeat.go_on,
        )
        health = make_health(
            config, self._communicator, self._signals, self._heartbeat, checkpoints, self.hosts
        )
        health.fix = "a lower learning rate, a warm-up or optim.clip_norm; or guard.nonfinite=skip"
        self._points = SyncPoints(
            config,
            self._communicator,
            learner,
            health,
            self._heartbeat,
            self._log,
            beginning,
            self._ranks,
        )
        prepared: tuple[Any, Any] = learner.prepared
        return prepared

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
        self._need("ctx.resume()")
        self._learner.check_resume(prepared)
        if self._stream is not None:
            raise UserError(
                "ctx.resume() after ctx.samples()", "ctx.resume()", "right after ctx.prepare()"
            )
        if self.run is None:
            raise UserError(
                "there is no run folder", "ctx.resume()", "hvdtrain.init({'run': 'DIR'})"
            )
        self._resumed = True
        self._heartbeat.beat("reading the checkpoint", 0, 0)
        try:
            found = restore(
                self._communicator,
                self._learner,
                self._former,
                self._limit_bytes,
                self._heartbeat.go_on,
            )
        except UserError as error:
            if error.where in ("state of the model", "state of the optimizer"):
                error.where = f"{self._former}"
                error.fix = (
                    "the model and the optimizer that the checkpoint was made with; or another run="
                )
            raise
        return self._learner.resumed({} if found is None else self._go_on_from(found))

    def _go_on_from(self, found: Restored) -> dict[str, Any]:
        assert self.run is not None
        values = decoded(found.extra, self._extra_values.from_arrays, self.run)
        self._notes += found.notes
        self._points.go_on_from(dataclasses.replace(found.train_state, is_kept=False))
        self._order = Order(*values["order"])
        if self._points.checkpoints.saver is not None:
            self._points.checkpoints.saver.resume_from(found.train_state)
        extra: dict[str, Any] = values["extra"]
        return extra

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
        self._need("ctx.samples()")
        if self._stream is not None:
            raise UserError(
                "a second ctx.samples()",
                "ctx.samples()",
                "one loop with epochs=N; what is read once: ctx.each(dataset, batch=...)",
            )
        stream = SampleStream(
            self._config,
            self._communicator,
            self._learner,
            dataset,
            batch,
            epochs,
            self._config.seed if seed is None else seed,
        )
        if self._order is not None and self._order != stream.order:
            what = (
                f"the checkpoint has {_of_order(self._order)}, ctx.samples() "
                f"{_of_order(stream.order)}"
            )
            raise UserError(
                what, str(self.run), "the data set and seed that it was made with; or another run="
            )
        if self._ranks is not None and not self._resumed:
            what = (
                "guard.lost=shrink goes on from the newest checkpoint, and the loop would begin "
                "anew"
            )
            raise UserError(what, "ctx.samples()", f"{self._words.resume} after ctx.prepare()")
        if self.run is not None and not self._resumed and self._former is not None:
            fix = (
                f"{self._words.resume} after ctx.prepare(); or resume=no and another run= to "
                "begin anew"
            )
            raise UserError(
                f"{self.run} has a checkpoint, and the loop would begin anew", "ctx.samples()", fix
            )
        self._order = stream.order
        self._stream = stream
        now = self._points.now
        p = dataclasses.replace(now.progress, dataset=len(stream.source), total=stream.total)
        self._points.go_on_from(dataclasses.replace(now, progress=p))
        if self._is_new:
            on_rank_0(self._communicator, self._write_first_files)
        self._start_event(stream)
        self._heartbeat.training = True
        return self._batches(stream)

    def _batches(self, stream: SampleStream) -> Iterator[Any]:
        while not self._points.now.progress.done and not self.should_stop:
            p = self._points.now.progress
            self._heartbeat.beat("reading samples", p.epoch, p.step)
            samples = stream.take(p)
            self._heartbeat.beat("step", p.epoch, p.step)
            self._samples = self._learner.begin_step(samples, stream.batch, stream.order.seed)
            self._is_evaluated = False
            yield self._samples
            if not self._learner.has_stepped:
                words = self._words
                what = f"the batch of step {p.step + 1} is over, and {words.step} was not called"
                fix = (
                    f"{words.whole_step}: once for each batch, on every rank; to accumulate "
                    f"gradients: {words.parts}"
                )
                raise UserError(what, "ctx.samples()", fix)
            self._points.sync()
            self._points.end_epoch()
        self._samples = None
        self._points.sync(force=True)

    def _stepped(self) -> None:
        """The step of the batch that the script has is done."""
        assert self._stream is not None
        self._points.stepped(self._samples.count if self.mesh.counts else 0, self._stream.batch)

    def each(self, dataset: Any, *, batch: int) -> Iterator[Any]:
        """Every sample once, over all ranks, in batches of at most `batch` on each: for an
        evaluation, within the loop or after it.

        Every rank gets equally many batches; one without samples has one that does not count:
        mean(..., count=batch.count), which inside of the loop is what a mean without a count has.
        """
        self._need("ctx.each()")
        check_batch(batch, "ctx.each()")
        source = checked_source(dataset, "ctx.each()", self._config)
        self._learner.sync_buffers(self._communicator)
        try:
            for rows in evaluation_batches(
                len(source), batch, self.mesh.data.rank, self.mesh.data.size
            ):
                self._heartbeat.beat("evaluation", int(self.epochs), self.step)
                self._evaluated = rows_of(source, rows, self._learner)
                yield self._evaluated
        finally:
            self._evaluated = None
            self._is_evaluated = True

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
        self._need("ctx.backward()")
        self._learner.backward(loss, count)

    def accumulate(self, loss_of: Callable[[Any], Any], *, at_most: int) -> Any:
        """Gradient accumulation: backward() in parts of at most so many samples, of which each
        needs memory by itself.

        loss_of(part): a forward pass, the mean loss over part["x"], ...; called equally often on
        all ranks. Where the mean is not over samples it returns (loss, count), as backward() has
        them. Returns this rank's mean loss.
        """
        self._need("ctx.accumulate()")
        check_batch(at_most, "ctx.accumulate()", "at_most", "samples of a part, 1 or more")
        return self._learner.accumulate(loss_of, at_most)

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
        self._need("ctx.value_and_grad()")
        if at_most is not None:
            check_batch(at_most, "ctx.value_and_grad()", "at_most", "samples of a part, 1 or more")
        found: Callable[..., Any] = self._learner.value_and_grad(
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
        self._need("ctx.update()")
        found: tuple[Any, Any] = self._learner.update(gradient, state, params, extra)
        return found

    def mean(self, metrics: Mapping[str, Any], count: Any = None) -> dict[str, float]:
        """Means over all ranks of this rank's means, by name, the same on every rank. A collective.

        count: samples, or items, that this rank's values are means of. Without it what the batch
        has: the count of its loss, or its samples; outside of a batch 1. After ctx.each() it is
        required, and inside with data.pad. NaN where no rank has any. Raises UserError where they
        give different names, on every rank, and for what is no mean.
        """
        if self._closed:
            self._need("ctx.mean()")
        check_mean(metrics)
        own = self._count_of_mean() if count is None else item_count(count, "ctx.mean()")
        fingerprints = allreduce_sums(
            self._communicator, names_fingerprint(metrics), "context.names"
        )
        check_same_names(self._communicator, metrics, fingerprints, "ctx.mean()", "gives")
        sums: Sums = {
            f"metric.{name}": scalar(name, value, "ctx.mean()") * own if own else 0.0
            for name, value in metrics.items()
        }
        total = allreduce_sums(self._communicator, sums | {"count": float(own)}, "context.mean")
        return {name: quotient(total[f"metric.{name}"], total["count"]) for name in metrics}

    def _count_of_mean(self) -> float:
        """What a mean without a count is weighted with. Raises UserError where that is not
        known."""
        fix = (
            "ctx.mean({...}, count=NUMBER), of the samples or tokens that this rank's values are "
            "means over"
        )
        if self._is_evaluated:
            what = "a mean after ctx.each() without a count would weight the ranks by another batch"
            raise UserError(what, "ctx.mean()", fix)
        if self._evaluated is not None and self._config.data.pad:
            raise UserError(
                "data.pad gives samples of different lengths, and the mean has no count",
                "ctx.mean()",
                fix,
            )
        return (
            self._batch_count("ctx.mean()")
            if self._evaluated is None
            else float(self._evaluated.count)
        )

    def _batch_count(self, where: str) -> float:
        """What the loss of the batch that the script trains on is weighted with on this rank."""
        if self._samples is None:
            return 1.0
        divisor: Divisor = self._learner.divisor
        if divisor.is_missing:
            what = (
                "the mean of this batch is not over samples, and what it is over is not known yet"
            )
            raise UserError(what, where, f"after {self._words.counted}")
        return float(self._samples.count) if divisor.items is None else divisor.items

    def log(self, **values: Any) -> None:
        """Numbers of this rank, as means over its samples, or over the count of its loss.

        The event "step" of the next sync point has their means over ranks and steps, the event
        "epoch" those of the whole epoch, when the loop asks for the batch after it. `lr` is the
        rate that events have.

        Device scalars cost no wait. The events go to the run folder's events.jsonl, the terminal,
        log.trackers and reports, which draw `loss`. The same names on every rank.
        """
        self._need("ctx.log()")
        self._points.add(values, self._batch_count("ctx.log()"))

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
        self._need("ctx.checkpoint()")
        self._learner.check_prepared(model, optimizer, "ctx.checkpoint()")
        if self._stream is None:
            raise UserError(
                "ctx.checkpoint() before ctx.samples()",
                "ctx.checkpoint()",
                f"inside of the loop, after {self._words.step}",
            )
        if self.run is None:
            raise UserError(
                "there is no run folder", "ctx.checkpoint()", "hvdtrain.init({'run': 'DIR'})"
            )
        if not self._learner.has_stepped:
            raise UserError(
                "the step of this batch is not made yet",
                "ctx.checkpoint()",
                f"after {self._words.whole_step}",
            )
        values = {"order": list(self._order or ()), "extra": extra}
        self._extra = extra
        if not self._checked_extra:  # at the first call, not when a checkpoint is due at last
            self._extra_values.to_arrays(values)
            self._checked_extra = True
        is_last = self._points.now.progress.done
        wanted = now or objective is not None
        self._points.sync(force=wanted or is_last or self._points.save_due)
        is_last = is_last or bool(self._points.health.stop_request)
        if not (wanted or is_last or self._points.save_due):
            return False
        if objective is not None:
            self._points.now = evaluated(self._communicator, self._points.now, objective, better)
        self._points.save_due = False
        self._points.confirm()
        self._saved.extra = self._extra_values.to_arrays(values)
        self._written_step = self.step
        if now or not is_last:
            self._points.checkpoints.save(dataclasses.replace(self._points.now, is_kept=now))
        if not is_last:
            return True
        self._write_last_checkpoint()
        return not self._failure

    def _write_last_checkpoint(self) -> None:
        is_over = self._points.now.progress.done
        failure = write_last_checkpoint(
            self._points, self._points.now, self._why_over, is_over=is_over
        )
        self._failure = failure and f"{failure}; older ones are there"

    def _save_at_stop(self) -> None:
        """The checkpoint to be resumed from, where the script has not written it at the step at
        which the loop stops.

        Not where the script keeps values of that step which only it knows: then the end says that
        there is none.
        """
        if (
            self.run is None
            or not self._points.health.stop_request
            or self._written_step == self.step
        ):
            return
        self._failure = on_rank_0(self._communicator, self._why_not_saved)
        if self._failure:
            return
        self._saved.extra = self._extra_values.to_arrays(
            {"order": list(self._order or ()), "extra": self._extra or {}}
        )
        self._write_last_checkpoint()

    def _why_not_saved(self) -> str:
        """Why rank 0, whose values count, cannot save the script's state; empty where all that the
        script keeps is known at this step."""
        own = [
            name for name, value in (self._extra or {}).items() if not hasattr(value, "state_dict")
        ]
        if own:
            why = f"it keeps {', '.join(own[:3])}, which only the script knows"
        elif self._extra is None:
            why = "ctx.checkpoint() was not called, so what the script keeps is not known"
        elif not self._learner.has_stepped:
            why = "its step is not made"
        else:
            return ""
        assert self.run is not None
        older = (
            "older ones are there"
            if any((self.run / "checkpoints").glob("step-*"))
            else "there is no older one"
        )
        return f"{why}: call it in every step, before ctx.should_stop; {older}"

    @property
    def should_stop(self) -> bool:
        """Whether the loop is to be stopped and resumed later: a signal to any rank,
        guard.max_time. The same on all ranks at each step.

        It changes every log.every_steps steps. Every rank reads it, after optimizer.step().
        """
        self._need("ctx.should_stop")
        if self._stream is not None and self._learner.has_stepped:
            self._points.sync()
        return bool(self._points.health.stop_request)

    def _start_event(self, stream: SampleStream) -> None:
        fields = own_events.start_fields(
            self._communicator, self.hosts, self._learner.describe(), stream
        )
        notes = [*self._notes, *getattr(self._communicator, "notes", ())]
        lines = own_events.header(fields, self._reason, stream, self.run, self._points.now, notes)
        self._log.emit(
            "start",
            self.step,
            lines=lines,
            **fields,
            seconds=round(self._points.now.seconds, 3),
            run=f"{self.run}",
        )
        self._tell_loss()

    def _tell_loss(self) -> None:
        """The event "lost" of a loop that goes on after a loss, once."""
        if self.untold_loss is None or self._former_loop is None:
            return
        from hvdtrain.training.elastic_job import tell_loss

        loss = self.untold_loss._replace(go_on_s=time.perf_counter() - self._former_loop.began_s)
        place = (
            f"step {self.step}, the newest checkpoint"
            if self.step
            else "the beginning: there is no checkpoint"
        )
        tell_loss(
            self._log,
            loss,
            self._points.now,
            self.step,
            self.size,
            f"{self.size} go on from {place}",
        )
        self.untold_loss = None

    def _need(self, where: str) -> None:
        if self._closed:
            raise UserError("the context is closed", where, "ctx = hvdtrain.init(...) again")
        if self._learner is None:
            raise UserError("nothing is prepared", where, f"{self._words.prepare} before")

    def close(self) -> int:
        """Ends the loop on every rank: waits for a checkpoint that is written, and for events. A
        script's end calls it, too.

        Returns the exit code: 0, or 75 where the loop was stopped to be resumed.
        `sys.exit(ctx.close())` tells it to the launcher.
        """
        if self._closed:
            return self._code()
        if self._stream is not None:
            self._points.sync(force=True)
            self._points.end_epoch()
            self._save_at_stop()
            self._points.confirm()
        self._end_event()
        self._release(failed=False)
        self._closing.close()
        return self._code()

    def _code(self) -> int:
        return (
            self._points.health.stop_code
            if self._learner is not None and self._points.health.stop_request
            else DONE
        )

    @property
    def _why_over(self) -> str:
        """Why the loop is over, or stops."""
        over = (
            "its samples are over" if self._points.now.progress.done else "the script left its loop"
        )
        return self._points.health.stop_request or over

    def _end_event(self) -> None:
        if self._stream is None:
            return
        now = self._points.now
        code = self._code()
        fields = own_events.end_fields(
            now, self._why_over, code, self.run, self._failure, self._config.checkpoint.keep_best
        )
        self._log.emit("stop" if code else "end", self.step, **fields)

    def _release(self, *, failed: bool) -> None:
        self._closed = True
        if self._learner is not None:
            close_all(
                self._points, self._stream.prefetcher if self._stream else None, failed=failed
            )
        else:
            self._log.close(CLOSE_S)

    def give_up(self) -> None:
        """Ends on this rank what reads and writes, after the loss of another one: what is under way
        is not waited for."""
        if self._closed:
            return
        self._closed = True
        if self._stream is not None:
            self._stream.prefetcher.close(wait=False)
        if self._learner is not None:
            self._points.checkpoints.give_up()
            self._points.checkpoints.close()
            self._learner = None
        self._log.close(HASTY_S)
        self._files.close()

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
        if self._closed:
            return
        error = different_calls(error) or error
        if self._stream is not None:
            fail(self._points, self.step, error)
        self._release(failed=True)
        self._closing.__exit__(type(error), error, error.__traceback__)


def _of_order(order: Order) -> str:
    return f"{order.dataset:,} samples with seed={order.seed}, {order.sampling} sampling"


# of MPI libraries and of Gloo
_OTHER_SIZE = (
    "MPI_ERR_TRUNCATE",
    "message truncated",
    "op.preamble.length <= op.nbytes",
)


def different_calls(error: BaseException) -> UserError | None:
    """Where a message from another rank is larger than the one that this rank's call waits for;
    None for another error."""
    if isinstance(error, UserError) or not any(text in str(error) for text in _OTHER_SIZE):
        return None
    frame = own_frame(error)
    where = (
        "a call of the context"
        if frame is None
        else f"{frame.filename}:{frame.lineno}: {frame.line}"
    )
    fix = (
        "the same calls of ctx on every rank: none under `if ctx.rank == 0`, no break or continue "
        "on one rank alone"
    )
    return UserError(
        "ranks make different calls: another rank is not in the one that this rank is in",
        where,
        fix,
    )
