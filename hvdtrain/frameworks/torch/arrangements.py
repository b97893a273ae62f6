"""The arrangements of a model on ranks: the classes in parallel/, and those that features name. A
job imports only the class that it asks for."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

from hvdtrain.config.plugins import named
from hvdtrain.config.schema import Config
from hvdtrain.features.every_feature import FEATURES
from hvdtrain.frameworks.torch.arrangement import Arrangement


class Entry(NamedTuple):
    """A class of parallel/."""

    is_asked: Callable[[Config], bool]
    name: str  # "module:class"


WHOLE = "hvdtrain.frameworks.torch.parallel.whole_model:WholeModel"
# the first one that is asked for; else that of a feature, else the whole model on every rank
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


def module_of(name: str) -> Any:
    """A module of parallel/, by its name: nothing here imports one of them otherwise."""
    return importlib.import_module(f"{__package__}.parallel.{name}")
