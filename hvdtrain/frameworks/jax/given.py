"""A JAX model that a script passes as an object, and its trained weights."""

from __future__ import annotations

import re
from typing import Any

from hvdtrain.config.sections.section import Given, name_of_object
from hvdtrain.frameworks.jax.library_models import ModuleLibrary, library_of

# the address of an object, which differs between processes
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def given_model(model: Any) -> Given | None:
    """Returns the model if it is a module of a supported library or a pair (init, apply); else
    None."""
    is_pair = isinstance(model, tuple) and len(model) == 2 and all(map(callable, model))
    library = library_of(model)
    if library is None and not is_pair:
        return None
    kept = Trained(model, library)
    facts = (
        {"model, init": model[0], "model, apply": model[1]} if is_pair else {"model": type(model)}
    )
    form = {} if library is None else {"model, its form": _ADDRESS.sub("", library.form(model))}
    return Given(
        name_of_object(model[1] if is_pair else model),
        lambda: model,
        facts | form,
        kept.take,
        "jax",
        trained=kept.get,
    )


class Trained:
    """The weights of a job whose script passed the model."""

    def __init__(self, model: Any, library: ModuleLibrary | None) -> None:
        self._model = model
        self._library = library
        self._found = None

    def take(self, learner: Any) -> None:
        """Keeps the weights of evaluations: the averages if there are any. A collective."""
        with learner.averaged():
            params = learner.tree()
        self._found = (
            params if self._library is None else self._library.trained(self._model, params)
        )

    def get(self) -> Any:
        """Returns the weights; None before the end of a job."""
        return self._found
