"""The division of layers and samples: the class and the function that features name."""

from __future__ import annotations

from collections.abc import Callable

from hvdtrain.config.plugins import named
from hvdtrain.config.schema import Config
from hvdtrain.extras.divided.layer_division import LayerDivision
from hvdtrain.features.every_feature import FEATURES
from hvdtrain.frameworks.torch.arrangement import Arrangement, SampleDivision


def layer_division_of(config: Config) -> type[LayerDivision] | None:
    """Returns the class that divides layers over the ranks of mesh.tensor; None if every rank has
    whole layers."""
    asked = (feature.layer_division_in(config) for feature in FEATURES)
    name = next(filter(None, asked), "")
    division: type[LayerDivision] | None = named(name) if name else None
    return division


def sample_division_of(config: Config) -> Callable[[Arrangement], SampleDivision]:
    """Returns the function that divides samples over the ranks of mesh.same_samples."""
    name = next(f.sample_division for f in FEATURES if f.sample_division and f.on(config))
    divide: Callable[[Arrangement], SampleDivision] = named(name)
    return divide
