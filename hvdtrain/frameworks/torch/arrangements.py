"""The arrangement of a model on ranks: the class that a feature names."""

from __future__ import annotations

from hvdtrain.config.plugins import named
from hvdtrain.config.schema import Config
from hvdtrain.features.every_feature import FEATURES
from hvdtrain.frameworks.torch.arrangement import Arrangement

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


def load_classes(config: Config) -> None:
    """Imports the classes with which a job arranges its model and divides its layers."""
    arrangement_of(config)
    for name in (feature.layer_division_in(config) for feature in FEATURES):
        if name:
            named(name)
