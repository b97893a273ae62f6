"""A keras.Model that a script passes as an object."""

from __future__ import annotations

from typing import Any

from hvdtrain.config.sections.section import Given, name_of_object
from hvdtrain.frameworks.keras.objects import GivenKerasModel


def given_model(model: Any) -> Given | None:
    """Returns a Keras model, which with the torch backend is a torch module too; else None."""
    if not any(
        kind.__name__ == "Model" and kind.__module__.startswith("keras.")
        for kind in type(model).__mro__
    ):
        return None
    given = GivenKerasModel(model)
    # on torch, framework=torch trains it as a module; for other backends, torch reports it
    return Given(
        name_of_object(model), given, given.facts(), given.take, "keras", also_trained_by=("torch",)
    )
