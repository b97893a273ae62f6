"""The arrangement of a model on ranks: the class that a feature names, or the whole model."""

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
    arrangement: type[Arrangement] = named(next(filter(None, asked), WHOLE))
    return arrangement
