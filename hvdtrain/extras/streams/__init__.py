"""Streams: data that are read in an order of their own, such as an IterableDataset or a
generator."""

from hvdtrain.core.extras import Extra

EXTRA = Extra(
    status="experimental",
    says="Trains on streams: IterableDatasets, also of Hugging Face, and generators.",
    streams="to train on it, data.epoch_samples=N, the samples of an epoch (docs/streams.md)",
)
