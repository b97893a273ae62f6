"""Batches: the samples that a script trains on and evaluates, and means over them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from hvdtrain.comm.on_all_ranks import allreduce_sums, on_rank_0
from hvdtrain.context.logged import check_mean, check_same_names, names_fingerprint, quotient
from hvdtrain.context.loop import ScriptLoop
from hvdtrain.context.stream import SampleOrder, SampleStream, check_batch, checked_source, rows_of
from hvdtrain.core.metrics import Sums, scalar
from hvdtrain.data.sampler import evaluation_batches
from hvdtrain.errors import UserError
from hvdtrain.frameworks.user_loop import Divisor, item_count


class Batches:
    """The part of a Context that handles samples; its methods have the same names as the
    Context's."""

    def __init__(self, loop: ScriptLoop) -> None:
        self._loop = loop
        self._samples: Any = None  # the batch that the script trains on
        self._evaluated: Any = None  # the batch of ctx.each() that it evaluates
        self._is_evaluated = False  # ctx.each() has ended, and samples() has given no batch since

    def samples(
        self, dataset: Any, *, batch: int, epochs: float, seed: int | None
    ) -> Iterator[Any]:
        loop = self._loop
        loop.need("ctx.samples()")
        if loop.stream is not None:
            raise UserError(
                "ctx.samples() was called twice",
                "ctx.samples()",
                "one loop with epochs=N; to read data once: ctx.each(dataset, batch=...)",
            )
        stream = SampleStream(
            loop.config,
            loop.communicator,
            loop.learner,
            dataset,
            batch,
            epochs,
            loop.config.seed if seed is None else seed,
        )
        self._check_goes_on(stream)
        loop.order = stream.order
        loop.stream = stream
        now = loop.points.now
        p = dataclasses.replace(now.progress, dataset=len(stream.source), total=stream.total)
        loop.points.go_on_from(dataclasses.replace(now, progress=p))
        environment = loop.record_environment()  # before a collective: other ranks wait for it
        if loop.run.is_new:
            on_rank_0(loop.communicator, lambda: loop.run.write_first_files(stream.config))
        loop.emit_start(stream, environment)
        loop.heartbeat.training = True
        return self._batches(stream)

    def _check_goes_on(self, stream: SampleStream) -> None:
        """Raises UserError if the samples differ from the checkpoint's, or if a loop that has a
        checkpoint would start from the beginning."""
        loop = self._loop
        if loop.order is not None and loop.order != stream.order:
            what = (
                f"the checkpoint has {_of_order(loop.order)}, ctx.samples() "
                f"{_of_order(stream.order)}"
            )
            raise UserError(
                what,
                str(loop.run.path),
                "the data set and seed of the checkpoint; or another run=",
            )
        if loop.ranks is not None and not loop.is_resumed:
            what = (
                "guard.lost=shrink resumes from the newest checkpoint, but the loop would "
                "start from the beginning"
            )
            raise UserError(what, "ctx.samples()", f"{loop.words.resume} after ctx.prepare()")
        if loop.run.path is not None and not loop.is_resumed and loop.run.former is not None:
            what = f"{loop.run.path} has a checkpoint, but the loop would start from the beginning"
            fix = (
                f"{loop.words.resume} after ctx.prepare(); or resume=no and another run= to "
                "start from the beginning"
            )
            raise UserError(what, "ctx.samples()", fix)

    def _batches(self, stream: SampleStream) -> Iterator[Any]:
        loop = self._loop
        while not loop.points.now.progress.done and not loop.should_stop:
            p = loop.points.now.progress
            loop.heartbeat.beat("reading samples", p.epoch, p.step)
            samples = stream.take(p)
            loop.heartbeat.beat("step", p.epoch, p.step)
            self._samples = loop.learner.begin_step(samples, stream.batch, stream.order.seed)
            self._is_evaluated = False
            yield self._samples
            if not loop.learner.has_stepped:
                words = loop.words
                what = f"the batch of step {p.step + 1} ended without a call of {words.step}"
                fix = (
                    f"{words.whole_step}: once for each batch, on every rank; to accumulate "
                    f"gradients: {words.parts}"
                )
                raise UserError(what, "ctx.samples()", fix)
            loop.points.sync()
            loop.points.end_epoch()
        self._samples = None
        loop.points.sync(force=True)

    def stepped(self) -> None:
        """Records that the step of the current batch is done."""
        loop = self._loop
        assert loop.stream is not None
        loop.points.stepped(self._samples.count if loop.mesh.counts else 0, loop.stream.batch)

    def each(self, dataset: Any, *, batch: int) -> Iterator[Any]:
        loop = self._loop
        loop.need("ctx.each()")
        check_batch(batch, "ctx.each()")
        source = checked_source(dataset, "ctx.each()", loop.config)
        loop.learner.sync_buffers(loop.communicator)
        data = loop.mesh.data
        try:
            for rows in evaluation_batches(len(source), batch, data.rank, data.size):
                loop.heartbeat.beat("evaluation", int(loop.epochs), loop.step)
                self._evaluated = rows_of(source, rows, loop.learner)
                yield self._evaluated
        finally:
            self._evaluated = None
            self._is_evaluated = True

    def mean(self, metrics: Mapping[str, Any], count: Any) -> dict[str, float]:
        communicator = self._loop.communicator
        if self._loop.is_closed:
            self._loop.need("ctx.mean()")
        check_mean(metrics)
        own = self._count_of_mean() if count is None else item_count(count, "ctx.mean()")
        fingerprints = allreduce_sums(communicator, names_fingerprint(metrics), "context.names")
        check_same_names(communicator, metrics, fingerprints, "ctx.mean()", "gives")
        sums: Sums = {
            f"metric.{name}": scalar(name, value, "ctx.mean()") * own if own else 0.0
            for name, value in metrics.items()
        }
        total = allreduce_sums(communicator, sums | {"count": float(own)}, "context.mean")
        return {name: quotient(total[f"metric.{name}"], total["count"]) for name in metrics}

    def _count_of_mean(self) -> float:
        """Returns the weight of a mean without a count. Raises UserError if it is not known."""
        fix = (
            "ctx.mean({...}, count=NUMBER), the number of samples or tokens that this rank "
            "averaged over"
        )
        if self._is_evaluated:
            what = (
                "without a count, a mean after ctx.each() would weight the ranks by the wrong batch"
            )
            raise UserError(what, "ctx.mean()", fix)
        if self._evaluated is not None and self._loop.config.data.pad:
            raise UserError(
                "data.pad makes samples variable-length, but the mean has no count",
                "ctx.mean()",
                fix,
            )
        return self.count("ctx.mean()") if self._evaluated is None else float(self._evaluated.count)

    def count(self, where: str) -> float:
        """Returns the weight of the current batch's loss on this rank."""
        if self._samples is None:
            return 1.0
        divisor: Divisor = self._loop.learner.divisor
        if divisor.is_missing:
            what = (
                "the loss of this batch is not a mean over samples, and its count is not known yet"
            )
            raise UserError(what, where, f"after {self._loop.words.counted}")
        return float(self._samples.count) if divisor.items is None else divisor.items


def _of_order(order: SampleOrder) -> str:
    return f"{order.dataset:,} samples with seed={order.seed}, {order.sampling} sampling"
