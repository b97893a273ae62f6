"""The keys data.epoch_samples and data.shuffle_buffer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from hvdtrain.config.sections.section import Section

if TYPE_CHECKING:  # the section that has these keys
    from hvdtrain.config.sections.data import DataConfig as Data
else:
    Data = Section


class StreamKeys(Data):
    """How a stream is divided into epochs and shuffled."""

    section = "data"
    behind = "shuffle_window"
    epoch_samples: int | None = Field(
        default=None,
        ge=1,
        le=2**50,
        description="samples of an epoch, for training data that are a stream: an IterableDataset "
        "of torch or of Hugging Face, or a generator function; default: the data are read in any "
        "order",
    )
    shuffle_buffer: int = Field(
        default=0,
        ge=0,
        le=2**24,
        description="samples of a stream in memory, from which the seed draws the next one; 0: "
        "in the order of the stream",
    )

    @property
    def opener(self) -> str:
        is_stream = self.epoch_samples is not None
        return "hvdtrain.extras.streams.open:open_stream" if is_stream else super().opener


KEYS = (StreamKeys,)
