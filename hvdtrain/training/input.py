"""The samples of each step: which ones a rank reads, in how many micro-batches, prefetched by other
threads during earlier steps."""

from __future__ import annotations

import itertools
import math
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hvdtrain.comm.communicator import Communicator
from hvdtrain.config.schema import Config
from hvdtrain.config.sections.batch import BatchConfig
from hvdtrain.config.sections.data import DataConfig
from hvdtrain.core.arrays import Batch
from hvdtrain.core.progress import Hyper, Progress
from hvdtrain.data.sampler import (
    BlockShuffle,
    BlocksOfRanks,
    Order,
    Positions,
    Shuffle,
    largest_share,
    parts_by_length,
    parts_of_rank,
    positions_of_rank,
)
from hvdtrain.data.source import Source
from hvdtrain.errors import UserError
from hvdtrain.frameworks.learner import Learner
from hvdtrain.recipe.noise import sample_weights
from hvdtrain.recipe.recipe import Recipe

if TYPE_CHECKING:
    from hvdtrain.data.upcoming import Upcoming


def split_step(
    config: Config,
    progress: Progress,
    batch: int,
    first_batch: int,
    communicator: Communicator,
    draws: Shuffle | None = None,
    lengths: np.ndarray | None = None,
) -> list[Positions]:
    """Returns the samples of this rank's micro-batches in the step after `progress`, which has
    `batch` samples over all ranks.

    draws: replaces data.shuffle. lengths: int64 (dataset,), with data.bucket_by, which puts similar
    lengths into one micro-batch.

    Every rank gets the same number of micro-batches, since a forward or backward pass may contain
    collectives; a micro-batch may be empty. A batch that has grown is divided by pass first, then
    by rank. So the samples of all ranks in a pass, over which norm.kind=sync normalizes, are the
    same for any number of ranks. batch.micro and a pipeline divide a rank's share.
    """
    rank = communicator.rank
    size = communicator.size
    sampling = config.data.sampling
    share = largest_share(progress.samples, batch, size, progress.dataset, sampling)
    parts = parts_of_step(config.batch, batch, first_batch)
    passes = passes_of_step(config, share, batch, first_batch) // parts
    shuffle = draws or block_shuffle(config.data)
    if lengths is not None:
        whole = positions_of_rank(
            progress.samples, batch, 0, 1, progress.dataset, config.seed, sampling, shuffle
        )
        return parts_by_length(whole, lengths, parts * passes, rank, size)
    shares = parts_of_rank(
        progress.samples, batch, parts, rank, size, progress.dataset, config.seed, sampling, shuffle
    )
    return [micro_batch for positions in shares for micro_batch in positions.split(passes)]


DEFAULT_BLOCK = 256  # samples, for data that are not stored in blocks


def block_shuffle(config: DataConfig) -> BlockShuffle | None:
    """Returns the shuffle of data.shuffle=blocks; None: each epoch is one shuffle of all
    samples."""
    return (
        BlockShuffle(config.shuffle_block or DEFAULT_BLOCK, config.shuffle_window)
        if config.shuffle == "blocks"
        else None
    )


def ranks_read_own_blocks(config: Config) -> bool:
    """Whether ranks may divide a step by block: nothing else may decide which rank reads a
    sample."""
    is_free = (
        config.data.shuffle == "full"
        and config.data.sampling == "global"
        and config.norm.kind != "ghost"
    )
    return (
        is_free
        and not config.data.sample_weights
        and config.data.bucket_by is None
        and not config.is_asynchronous
    )


def lengths_to_sort_by(config: DataConfig, source: Source) -> np.ndarray | None:
    """Returns lengths of all samples, int64 (n,), by which data.bucket_by divides a step; None
    without it. Raises UserError."""
    if config.bucket_by is None:
        return None
    padded = [
        name
        for name, field in source.fields.items()
        if name in config.pad or (config.is_of_texts and field.padding and not field.is_mask)
    ]
    name = next(iter([*config.pad, *padded])) if config.bucket_by == "length" else config.bucket_by
    where = config.where("bucket_by")
    lengths = source.known_lengths(name)
    if lengths is None:
        fix = f"{' or '.join(padded)}, or length: that of {next(iter(padded), '')}"
        raise UserError(
            f"data.bucket_by={config.bucket_by} is not a variable-length field",
            where,
            fix,
        )
    return lengths


def passes_of_step(config: Config, largest_share: int, batch: int, first_batch: int) -> int:
    """The number of passes of a step: micro_batches_per_step(), and without batch.micro more for
    ranks that wait for each other."""
    passes = micro_batches_per_step(config.batch, largest_share, batch, first_batch)
    return passes * (1 if isinstance(config.batch.micro, int) else config.parallel.more_passes)


def micro_batches_per_step(
    config: BatchConfig, largest_share: int, batch: int, first_batch: int
) -> int:
    """Returns the number of forward passes of a rank in a step of `batch` samples over all ranks,
    if no rank reads more than `largest_share`."""
    if isinstance(config.micro, int):
        return -(-largest_share // config.micro)
    return parts_of_step(config, batch, first_batch)


def parts_of_step(config: BatchConfig, batch: int, first_batch: int) -> int:
    """Returns the number of parts that a step of `batch` samples is divided into before the ranks
    share them.

    Without batch.micro a step takes one pass, and more once the batch has grown beyond the job's
    first one, so that memory stays constant.
    """
    return 1 if isinstance(config.micro, int) else -(-batch // first_batch)


def fewest_samples(config: Config, batch: int, first_batch: int, readers: int) -> int:
    """Returns the smallest number of samples in a pass on any of the ranks that divide a step of
    `batch` samples. Passes without samples do not count."""
    share = -(-batch // readers)
    return max(1, batch // (readers * passes_of_step(config, share, batch, first_batch)))


def read_batch(
    source: Source, positions: Positions, hyper: Hyper, config: Config, cached_on_device: bool
) -> Batch:
    """Reads the samples at `positions`, with their augmentation parameters, and random loss weights
    if recipe.sample_noise is set.

    If the learner has cached the data set on the device, the batch contains sample indices instead
    of fields.
    """
    samples, epochs = positions
    batch: Batch = (
        {"indices": samples}
        if cached_on_device
        else source.read_in_epochs(samples, epochs, config.seed)
    )
    augmentation = (
        config.augment.replace(resized_crop=0.0) if source.crops_at_random else config.augment
    )
    if augmentation.is_enabled:
        from hvdtrain.data.images import augment
        from hvdtrain.data.images.mixing import partners_of

        height, width, channels = source.fields["x"].shape  # check_augmentation() guarantees it
        shape = height, width, channels
        parameters = augment.draw(augmentation, config.seed, epochs, samples, shape)
        batch["augmentation"] = parameters
        partners = partners_of(augmentation, config.seed, epochs, samples, len(source))
        if partners is not None:
            batch["partner_augmentation"] = augment.draw(
                augmentation, config.seed, epochs, partners, shape
            )
            batch |= {
                key: value
                for key in ("mixup_weight", "cutmix_box")
                if (value := getattr(parameters, key)) is not None
            }
            if cached_on_device:
                batch["partner_indices"] = partners
            else:
                batch |= _partners(
                    batch,
                    source.read_in_epochs(partners, epochs, config.seed),
                    source.moved_masks,
                )
    if hyper.sample_noise:
        batch["w"] = sample_weights(config.seed, hyper.step, samples, hyper.sample_noise)
    return batch


def _partners(batch: Batch, partners: Batch, masks: tuple[str, ...]) -> Batch:
    """Adds to a batch the samples that it is mixed with: images and labels. For masks, the pixels
    in its boxes, and no label."""
    if not masks:
        return {"partner_x": partners["x"], "partner_y": partners["y"]}
    from hvdtrain.data.images.mixing import paste

    del batch["mixup_weight"]
    pasted = {name: paste(batch[name], partners[name], batch["cutmix_box"]) for name in masks}
    return {"partner_x": partners["x"], **pasted}


DEFAULT_STEPS_AHEAD = 2
MOST_READERS = 8


class StepInput(NamedTuple):
    """The input of Learner.step()."""

    hyper: Hyper
    # the framework's DeviceBatches; the same number on every rank, some may be empty
    micro_batches: list[Any]


class ReadAhead(NamedTuple):
    """How many steps are prefetched, and by how many threads."""

    steps: int  # 0: no prefetching, take() reads each step itself
    readers: int  # threads; each reads a whole step


class _Pending(NamedTuple):
    """A step being read."""

    progress: Progress
    future: Future[StepInput]


class Prefetcher:
    """Prefetches the next steps; their samples depend only on progress."""

    def __init__(
        self,
        config: Config,
        communicator: Communicator,
        recipe: Recipe,
        source: Source,
        learner: Learner,
        draws: Order | None = None,
    ) -> None:
        self._config = config
        self._lengths = lengths_to_sort_by(config.data, source)
        self._communicator = communicator
        self._recipe = recipe
        self._source = source
        self._learner = learner
        self._draws = draws
        self.cached_on_device = learner.cache_on_device(source)
        self.samples = len(source)
        self.ahead, self.readers = read_ahead_of(
            config.data,
            source,
            sharers_of_cores(config, communicator),
            cached=self.cached_on_device,
        )
        if config.is_asynchronous:  # the next ticket is not known
            self.ahead, self.readers = ReadAhead(0, 1)
        self.waited_s = 0.0  # spent in take(), so far
        self._pool = ThreadPoolExecutor(self.readers, "hvdtrain-reader") if self.ahead else None
        self._queue: deque[_Pending] = deque()
        is_told = (
            not self.cached_on_device and not config.is_asynchronous and learner.readers is not None
        )
        known = source.foresight if is_told else None
        ranks = (
            1
            if known is None or learner.readers is None or not ranks_read_own_blocks(config)
            else learner.readers.size
        )
        self._shuffle: Shuffle | None = (
            BlocksOfRanks(known.rows) if known is not None and ranks > 1 else draws
        )
        # each block is decoded once, if they fit into memory: nothing to report
        window = block_shuffle(config.data)
        is_told = known is not None and (
            window is None or window.block * window.window > known.kept
        )
        self._upcoming: Upcoming | None = None
        if is_told:
            from hvdtrain.data.upcoming import Upcoming

            self._upcoming = Upcoming(source, self._samples_of, self._following, ranks)

    def take(self, progress: Progress) -> StepInput:
        """Returns the input of the step that follows `progress`. Raises its reader's error."""
        began = time.perf_counter()
        try:
            if self._pool is None:
                self._tell(progress)
                return self.prepare(progress)
            if (
                not self._queue or self._queue[0].progress != progress
            ):  # the first step, or another one than was expected
                self.discard()
                self._submit(progress)
            future = self._queue.popleft().future
            self._read_ahead(progress)
            return future.result()
        finally:
            self.waited_s += time.perf_counter() - began

    def evaluation(self, source: Source, batches: list[np.ndarray]) -> Iterator[Any | None]:
        """Batches on the device, from device_batches(), prefetched like steps."""
        return device_batches(
            source,
            batches,
            self._learner,
            None if is_read_at_once(source) else self._pool,
            self.ahead,
        )

    def prepare(self, progress: Progress) -> StepInput:
        """Reads the step that follows `progress`, on the calling thread."""
        hyper = self._recipe.at(progress)
        micro_batches: list[Any] = []
        for positions in self._positions(progress):
            batch = read_batch(self._source, positions, hyper, self._config, self.cached_on_device)
            micro_batches.append(self._learner.to_device(batch))
        return StepInput(hyper, micro_batches)

    def drain(self) -> None:
        """Waits until every pending read is done, and discards the results."""
        while self._queue:
            self._queue.popleft().future.exception()

    def close(self, wait: bool = True) -> None:
        """Discards prefetched steps and ends the readers; wait=False does not wait for a read that
        may hang."""
        self.discard()
        if self._pool is not None:
            self._pool.shutdown(wait=wait, cancel_futures=True)

    @property
    def summary(self) -> str:
        """Returns text for the job's header."""
        order = "" if self._draws is None else self._draws.words(self._samples_of_job)
        return f"{order}, {self._how_read}" if order else self._how_read

    @property
    def _how_read(self) -> str:
        if self.cached_on_device:
            return "on the device"
        if self.ahead == 0:
            return "read when needed"
        own = ", each rank other blocks" if isinstance(self._shuffle, BlocksOfRanks) else ""
        return (
            f"{self.readers} reader{'s' if self.readers > 1 else ''}, {self.ahead} steps ahead{own}"
        )

    @property
    def _samples_of_job(self) -> int:
        """The samples that the whole job reads; those of one epoch if only time ends it."""
        epochs = self._recipe.epochs if math.isfinite(self._recipe.epochs) else 1.0
        samples = math.ceil(epochs * self.samples)
        steps = self._config.stop.steps
        if steps is None or self._recipe.batch.to:
            return samples
        return min(samples, steps * self._recipe.batch.first)

    def _read_ahead(self, progress: Progress) -> None:
        """Fills the queue with the next `ahead` steps after `progress`, up to the end of the
        job."""
        last = self._queue[-1].progress if self._queue else progress
        following = itertools.islice(self._following(last), 1, None)
        while len(self._queue) < self.ahead and (step := next(following, None)) is not None:
            self._submit(step)

    def _following(self, progress: Progress) -> Iterator[Progress]:
        """Yields `progress`, then the progress after each further step, up to the end of the
        job."""
        yield progress
        while True:
            progress = progress.advance(self._recipe.at(progress).batch)
            if progress.done or progress.step == self._config.stop.steps:
                return
            yield progress

    def _submit(self, progress: Progress) -> None:
        assert self._pool is not None
        self._tell(progress)
        self._queue.append(_Pending(progress, self._pool.submit(self.prepare, progress)))

    def _tell(self, progress: Progress) -> None:
        if self._upcoming is not None:
            self._upcoming.reads(progress)

    def _positions(self, progress: Progress) -> list[Positions]:
        readers = self._learner.readers
        batch = self._recipe.at(progress).batch
        if readers is None:
            return []
        return split_step(
            self._config,
            progress,
            batch,
            self._recipe.batch.first,
            readers,
            self._shuffle,
            self._lengths,
        )

    def _samples_of(self, progress: Progress) -> np.ndarray:
        """Returns all samples that a step reads: its samples, then the ones they are mixed with."""
        from hvdtrain.data.images.mixing import partners_of  # here: few jobs announce samples

        found = [np.empty(0, np.int64)]
        for samples, epochs in self._positions(progress):
            partners = partners_of(
                self._config.augment, self._config.seed, epochs, samples, self.samples
            )
            found += [samples] if partners is None else [samples, partners]
        return np.concatenate(found)

    def discard(self) -> None:
        """Drops prefetched steps, for example because ranks have changed and read other samples."""
        while self._queue:
            self._queue.popleft().future.cancel()
        if self._upcoming is not None:
            self._upcoming.forget()


def device_batches(
    source: Source,
    batches: Sequence[np.ndarray],
    learner: Learner,
    pool: ThreadPoolExecutor | None,
    ahead: int,
) -> Iterator[Any | None]:
    """Yields a DeviceBatch of the samples of each batch (int64 (n,)), in order; None for an empty
    batch, unless the learner is_sharded, because then the forward pass is a collective.

    The threads of `pool` prefetch up to `ahead` batches; without a pool each batch is read when
    needed. Raises the reader's errors.
    """

    def prepare(samples: np.ndarray) -> Any | None:
        return (
            learner.to_device(source.read(samples)) if len(samples) or learner.is_sharded else None
        )

    if pool is None:
        yield from map(prepare, batches)
        return
    pending: deque[Future[Any | None]] = deque()
    for taken in range(len(batches)):
        for samples in batches[taken + len(pending) : taken + 1 + ahead]:
            pending.append(pool.submit(prepare, samples))
        yield pending.popleft().result()


def is_read_at_once(source: Source) -> bool:
    """Whether samples are read by the thread that needs them: for copies from memory, and for the
    user's code in this process."""
    return source.reads_from_memory or source.reads_in_process


def read_ahead_of(
    config: DataConfig, source: Source, ranks_on_host: int, *, cached: bool = False
) -> ReadAhead:
    """How far a source is prefetched: not at all if the user's code would run on other threads than
    the training thread."""
    if source.reads_in_process:
        return ReadAhead(0, 1)
    return choose_read_ahead(config, cached or is_read_at_once(source), ranks_on_host)


def sharers_of_cores(config: Config, communicator: Communicator) -> int:
    """Returns the ranks that divide the cores of this rank among them; with comm.bind each has its
    own."""
    return communicator.local_size if config.comm.bind == "none" else 1


def choose_read_ahead(config: DataConfig, is_fast: bool, ranks_on_host: int = 1) -> ReadAhead:
    """Returns data.ahead and data.readers, or their defaults: no prefetching if reading `is_fast`,
    else by this rank's share of the cores.

    A reader reads a whole step, so at least as many steps are prefetched as there are readers.
    """
    if config.ahead == 0 or (config.ahead is None and is_fast and not config.readers):
        return ReadAhead(0, 1)
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    readers = config.readers or max(1, min(cores // ranks_on_host, MOST_READERS))
    steps = config.ahead or max(DEFAULT_STEPS_AHEAD, readers)
    return ReadAhead(steps, min(readers, steps))
