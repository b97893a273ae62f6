"""The arrangement of a model on ranks, and the division of its layers: the classes that features
name."""

from __future__ import annotations

from collections.abc import Callable

from hvdtrain.config.plugins import named
from hvdtrain.config.schema import Config
from hvdtrain.features.every_feature import FEATURES
from hvdtrain.frameworks.torch.arrangement import Arrangement, SampleDivision
from hvdtrain.frameworks.torch.layer_division import LayerDivision

WHOLE = "hvdtrain.frameworks.torch.parallel.whole_model:WholeModel"


def arrangement_of(config: Config) -> type[Arrangement]:
    """Returns the class of the configured arrangement, that of the first feature that has one;
    imports only that class, as some take half a second."""
    asked = (feature.arrangement_in(config) for feature in FEATURES)
    found = named(next(filter(None, asked), WHOLE))
    # a function, where the class depends on the class of another feature
    arrangement: type[Arrangement] = found if isinstance(found, type) else found(config)
    return arrangement


def is_arranged(config: Config) -> bool:
    """Whether a feature has an arrangement of its own, with its own strategy."""
    return any(feature.arrangement_in(config) for feature in FEATURES)


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
