"""The arrangements of a model on ranks: the classes in parallel/, and classes named by features. A
job imports only the class that it uses."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from hvdtrain.config.plugins import named
from hvdtrain.config.schema import Config
from hvdtrain.features.every_feature import FEATURES
from hvdtrain.frameworks.torch.arrangement import Arrangement


class Entry(NamedTuple):
    """A class of parallel/."""

    is_asked: Callable[[Config], bool]
    name: str  # "module:class"


WHOLE = "hvdtrain.frameworks.torch.parallel.whole_model:WholeModel"
# the first one that the configuration requests; else a feature's, else the whole model on every
# rank
ENTRIES = (
    Entry(
        lambda config: config.shard.stage == 3,
        "hvdtrain.frameworks.torch.parallel.zero_3.arrangement:ShardedRows",
    ),
    Entry(
        lambda config: config.parallel.pipeline > 1,
        "hvdtrain.frameworks.torch.parallel.pipeline.arrangement:PipelineStages",
    ),
    Entry(
        lambda config: config.parallel.tensor > 1,
        "hvdtrain.frameworks.torch.parallel.tensor.arrangement:TensorParts",
    ),
)


def arrangement_of(config: Config) -> type[Arrangement]:
    """Returns the class of the configured arrangement; imports only that one, as some take half a
    second."""
    asked = [entry.name for entry in ENTRIES if entry.is_asked(config)]
    asked += [each.arrangement for each in FEATURES if each.arrangement and each.on(config)]
    arrangement: type[Arrangement] = named(next(iter(asked), WHOLE))
    return arrangement
