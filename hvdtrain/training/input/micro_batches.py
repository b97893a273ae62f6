"""One step's micro-batches: which samples a rank reads, in how many forward passes, and what is sent to the device."""

from __future__ import annotations

from hvdtrain.comm.communicator import Communicator
from hvdtrain.config.schema import BatchConfig, Config
from hvdtrain.core.arrays import Batch
from hvdtrain.core.progress import Hyper, Progress
from hvdtrain.data.images import augment
from hvdtrain.data.sampler import Positions, largest_share, parts_of_rank
from hvdtrain.data.source import Source, crops_at_random, read_in_epochs
from hvdtrain.recipe.gradient_noise import sample_weights


def split_step(config: Config, progress: Progress, batch: int, first_batch: int, communicator: Communicator) -> list[Positions]:
    """The samples of this rank's micro-batches, in the step of `batch` samples over all ranks that follows `progress`.

    Every rank gets the same number of micro-batches, since a forward or backward pass may contain collectives; a micro-batch may be empty.
    A batch that has grown is divided by pass first, then by rank: the samples that all ranks have in a pass, over which norm.kind=sync
    normalizes, are the same for any number of ranks. What batch.micro and a pipeline divide is a rank's share.
    """
    rank, size, sampling = communicator.rank, communicator.size, config.data.sampling
    share = largest_share(progress.samples, batch, size, progress.dataset, sampling)
    parts = parts_of_step(config.batch, batch, first_batch)
    passes = passes_of_step(config, share, batch, first_batch) // parts
    shares = parts_of_rank(progress.samples, batch, parts, rank, size, progress.dataset, config.seed, sampling)
    return [micro_batch for positions in shares for micro_batch in positions.split(passes)]


def passes_of_step(config: Config, largest_share: int, batch: int, first_batch: int) -> int:
    """Passes of a step: micro_batches_per_step(); a pipeline takes more of them, so that its ranks wait less."""
    passes, parallel = micro_batches_per_step(config.batch, largest_share, batch, first_batch), config.parallel
    if parallel.pipeline == 1 or isinstance(config.batch.micro, int):
        return passes
    return passes * (parallel.micro_batches or 2 * parallel.pipeline)


def micro_batches_per_step(config: BatchConfig, largest_share: int, batch: int, first_batch: int) -> int:
    """Forward passes of a rank in a step of `batch` samples over all ranks, of which no rank reads more than `largest_share`."""
    if isinstance(config.micro, int):
        return -(-largest_share // config.micro)
    return parts_of_step(config, batch, first_batch)


def parts_of_step(config: BatchConfig, batch: int, first_batch: int) -> int:
    """Into how many parts a step of `batch` samples is divided before the ranks share them.

    Without batch.micro a step takes one pass, and more once the batch has grown beyond the job's first one, so that memory stays constant.
    """
    return 1 if isinstance(config.micro, int) else -(-batch // first_batch)


def fewest_samples(config: Config, batch: int, first_batch: int, readers: int) -> int:
    """Fewest samples of a pass of any of the ranks that divide a step of `batch` samples; passes without any do not count."""
    share = -(-batch // readers)
    return max(1, batch // (readers * passes_of_step(config, share, batch, first_batch)))


def read_batch(source: Source, positions: Positions, hyper: Hyper, config: Config, cached_on_device: bool) -> Batch:
    """The samples at `positions`, with their augmentation parameters, and random loss weights where recipe.sample_noise is set.

    Where the learner has cached the data set on the device, the batch holds the numbers of the samples in place of their fields.
    """
    samples, epochs = positions
    batch: Batch = {"indices": samples} if cached_on_device else read_in_epochs(source, samples, epochs, config.seed)
    augmentation = config.augment.replace(resized_crop=0.0) if crops_at_random(source) else config.augment
    if augment.is_enabled(augmentation):
        height, width, channels = source.fields["x"].shape  # check_augmentation() has made sure of it
        shape = height, width, channels
        parameters = augment.draw(augmentation, config.seed, epochs, samples, shape)
        batch["augmentation"] = parameters
        partners = augment.mixup_partners(augmentation, config.seed, epochs, samples, len(source))
        if partners is not None:
            batch["partner_augmentation"] = augment.draw(augmentation, config.seed, epochs, partners, shape)
            batch["mixup_weight"] = parameters.mixup_weight
            if cached_on_device:
                batch["partner_indices"] = partners
            else:
                partner_batch = read_in_epochs(source, partners, epochs, config.seed)
                batch["partner_x"], batch["partner_y"] = partner_batch["x"], partner_batch["y"]
    if hyper.sample_noise:
        batch["w"] = sample_weights(config.seed, hyper.step, samples, hyper.sample_noise)
    return batch
