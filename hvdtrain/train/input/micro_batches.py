"""One step's micro-batches: which samples a rank's passes take, and with which weights."""

from __future__ import annotations

from hvdtrain.comm.communicator import Communicator
from hvdtrain.config.schema import Config
from hvdtrain.core.arrays import Batch
from hvdtrain.core.progress import Hyper, Progress
from hvdtrain.data.images import augment
from hvdtrain.data.sampler import Positions, largest_share, places
from hvdtrain.data.source import Source
from hvdtrain.recipe.gradient_noise import sample_weights


def rows_of_step(config: Config, p: Progress, hyper: Hyper, first_batch: int, communicator: Communicator) -> list[Positions]:
    """The samples of this rank's passes: equally many passes on every rank, since a pass may have collectives in it.

    Without batch.micro a batch that has grown beyond the job's first one takes as many passes more, so that memory stays as it was.
    """
    mine = places(p.samples, hyper.batch, communicator.rank, communicator.size, p.dataset, config.seed, config.data.sampling)
    most = largest_share(p.samples, hyper.batch, communicator.size, p.dataset, config.data.sampling)
    return mine.split(passes(config, most, hyper.batch, first_batch))


def passes(config: Config, most: int, batch: int, first_batch: int) -> int:
    """Forward passes of a step: `most` is the largest share of a rank, `first_batch` the global batch that the job began with."""
    return -(-most // config.batch.micro) if config.batch.micro else -(-batch // first_batch)


def read(source: Source, part: Positions, hyper: Hyper, config: Config, held: bool) -> Batch:
    """The samples, with what is to be done to them on the device, and random weights where the recipe asks for gradient noise.

    Of a set that a learner holds it is the rows of the samples, not the samples.
    """
    rows, epochs = part
    batch: Batch = {"rows": rows} if held else source.read(rows)
    if augment.is_on(config.augment):
        batch["drawn"] = augment.draw(config.augment, config.seed, epochs, rows, source.shape)
        others = augment.partners(config.augment, config.seed, epochs, rows, len(source))
        if others is not None:
            more = source.read(others) if not held else {}
            batch |= {"rows2": others} if held else {"x2": more["x"], "y2": more["y"]}
            batch |= {"share": batch["drawn"].share, "drawn2": augment.draw(config.augment, config.seed, epochs, others, source.shape)}
    if hyper.sample_noise:
        batch["w"] = sample_weights(config.seed, hyper.step, rows, hyper.sample_noise)
    return batch
