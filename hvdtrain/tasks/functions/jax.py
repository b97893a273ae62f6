"""Functions of a script in JAX, as in torch.py; they are compiled, and see rows of padding, which are not counted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from hvdtrain.data.source import Field
from hvdtrain.errors import UserError
from hvdtrain.tasks.functions.user_functions import Loss, OwnMetric, terms_of
from hvdtrain.tasks.inputs.jax import JaxInputs, as_given
from hvdtrain.tasks.task import Each, Part, Place

Arrays = Mapping[str, jax.Array]


class JaxFunctions:
    """A loss (outputs, batch) -> (n,). Images are (n, H, W, C)."""

    def __init__(self, loss: Loss, inputs: JaxInputs, fields: Mapping[str, Field], place: Place) -> None:
        if loss.ignore is not None or "class" in loss.facts:
            raise UserError("loss is a module of torch", "hvdtrain.train(), loss", "a function of JAX arrays, or framework=torch")
        self._loss, self._inputs, self._fields, self._dtype = loss, inputs, fields, place.dtype

    def inputs(self, batch: Arrays) -> jax.Array:
        return self._inputs(batch["x"])

    def batch_for_user(self, batch: Arrays) -> dict[str, jax.Array]:
        of_others = {name: as_given(batch[name], field, self._dtype) for name, field in self._fields.items() if name != "x"}
        return {"x": self.inputs(batch), **of_others}

    def each(self, outputs: Any, batch: Arrays, training: bool) -> Each:
        loss, samples = self._loss.of(outputs, self.batch_for_user(batch)), len(batch["x"])
        if tuple(getattr(loss, "shape", ("no array",))) != (samples,):
            found = tuple(getattr(loss, "shape", (type(loss).__name__,)))
            fix = "one number for each sample: hvdtrain takes the mean over the samples of all ranks"
            raise UserError(f"loss gives {found} for {samples} samples, not ({samples},)", "hvdtrain.train(), loss", fix)
        return Each(loss, {})


class JaxMeasured:
    """A part with the terms of metrics of the user's own."""

    def __init__(self, part: Part, metrics: Mapping[str, OwnMetric], place: Place) -> None:
        self._part, self._metrics = part, metrics
        self.inputs = part.inputs

    def each(self, outputs: Any, batch: Arrays, training: bool) -> Each:
        each = self._part.each(outputs, batch, training)
        fields = self._part.batch_for_user(batch) if isinstance(self._part, JaxFunctions) else batch
        own = terms_of(self._metrics, jax.lax.stop_gradient(outputs), fields, len(each.loss), _rows)
        return each._replace(terms={**each.terms, **own})


def _rows(value: Any, samples: int, whole: bool) -> jax.Array:
    """An array; one number of all samples would count padding."""
    return jnp.asarray(value)
