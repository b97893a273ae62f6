"""Tasks in JAX, like the tasks in torch.py; this code is compiled. Functions of a script also get
rows of padding, which are not counted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hvdtrain.data.field import Field
from hvdtrain.errors import UserError
from hvdtrain.tasks.label_counts import LossForm, Operations, edges_of_bins, right_terms, terms
from hvdtrain.tasks.points import Points
from hvdtrain.tasks.task import DeviceAndDtype, Each, TaskPart, counts_exactly, outputs_of
from hvdtrain.tasks.transform import Transform
from hvdtrain.tasks.user_functions import UserLoss, UserMetrics, refuse_parts, terms_of

Arrays = Mapping[str, jax.Array]


class JaxInputs:
    """Computes the model's input from x of a batch, images uint8 (n, H, W, C): (n, ...), single
    numbers (n, 1)."""

    def __init__(self, transform: Transform, place: DeviceAndDtype, users_model: bool) -> None:
        self._transform = transform
        self._dtype = place.dtype
        self._keeps_integers = users_model

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x[:, None] if x.ndim == 1 else x
        if self._transform.fill is not None:
            fill = jnp.asarray(self._transform.along(self._transform.fill), self._dtype)
            x = jnp.where(jnp.isnan(x), fill, x.astype(self._dtype))
        if self._transform.is_of_images or self._transform.is_standardized:
            mean, std = (
                jnp.asarray(self._transform.along(array), self._dtype)
                for array in (self._transform.mean, self._transform.std)
            )
            x = x.astype(self._dtype)
            return ((x / 255.0 if self._transform.is_of_images else x) - mean) / std
        return (
            as_given(x, self._transform.x, self._dtype)
            if self._keeps_integers
            else x.astype(self._dtype)
        )


def as_given(array: jax.Array, field: Field, dtype: np.dtype) -> jax.Array:
    """Converts floats to the model's dtype and integers to int32; fields without a bound are not
    int32 on the device."""
    if np.dtype(field.dtype).kind == "f":
        return array.astype(dtype)
    is_integer = np.dtype(field.dtype).kind in "iu" and array.dtype != jnp.uint8
    return array.astype(jnp.int32) if is_integer else array


class JaxClassification:
    """Images are uint8 (n, H, W, C), other numbers (n, ...); logits (n, outputs), at least one for
    each class."""

    where = staticmethod(jnp.where)  # of this framework

    def __init__(self, inputs: JaxInputs, form: LossForm, *, turned: bool) -> None:
        self._inputs = inputs
        self._form = form
        self._turned = turned  # whether float images (n, C, H, W) become (n, H, W, C)
        # each() is compiled; the learner gathers the scores of an evaluation
        self.operations = Operations(
            jnp.asarray,
            jax.lax.stop_gradient,
            lambda logits: jax.nn.softmax(logits).max(1),
            np.asarray,
            can_copy=lambda logits: False,
        )

    def inputs(self, batch: Arrays) -> jax.Array:
        x = self._inputs(batch["x"])
        return x.transpose(0, 2, 3, 1) if self._turned else x

    def each(self, outputs: jax.Array, batch: Arrays, training: bool) -> Each:
        loss = self._of_labels(outputs, batch["y"], training)
        if "mixup_weight" in batch:
            weight = batch["mixup_weight"]
            loss = weight * loss + (1.0 - weight) * self._of_labels(
                outputs, batch["partner_y"], training
            )
        return Each(loss, right_terms(outputs, batch["y"], self._form.top_k))

    def _of_labels(self, logits: jax.Array, labels: jax.Array, training: bool) -> jax.Array:
        smoothing = self._form.smoothing if training else 0.0
        target = jax.nn.one_hot(labels, logits.shape[1], dtype=logits.dtype)
        # Szegedy et al. 2015, arXiv:1512.00567, section 7
        target = target * (1.0 - smoothing) + smoothing / logits.shape[1]
        each = (
            0.5 * jnp.square(logits - target)
            if self._form.squared_error
            else -target * jax.nn.log_softmax(logits)
        )
        weights = self._form.class_weights
        return (
            each.sum(1)
            if weights is None
            else each.sum(1) * jnp.asarray(weights, each.dtype)[labels]
        )


class JaxRegression:
    """Outputs (n, outputs), or maps in the layout of y, (n, H, W, C) or (n, C, H, W); targets of
    any shape with as many numbers. Images are uint8 (n, H, W, C)."""

    def __init__(
        self,
        inputs: JaxInputs,
        points: Points,
        target_mean: np.ndarray,
        place: DeviceAndDtype,
        *,
        of_maps: bool,
    ) -> None:
        """of_maps: whether the model maps (n, H, W, C) to (n, H, W, C)."""
        self._inputs = inputs
        self._points = points
        self._target_mean = target_mean
        self._of_maps = of_maps
        self._dtype = place.dtype

    @property
    def counts_exactly(self) -> bool:
        return self._points.has_gaps

    def inputs(self, batch: Arrays) -> jax.Array:
        x = self._inputs(batch["x"])
        maps = self._points.maps
        found: jax.Array = x if maps is None or not self._of_maps else maps.as_input(x, "last")
        return found

    def outputs_of(self, found: Any) -> Any:
        """Converts maps to the layout of y; anything else is not changed."""
        maps = self._points.maps
        shape = getattr(found, "shape", ())
        is_of_y = shape[1:] == self._points.shape and not self._of_maps
        if maps is None or is_of_y or len(shape) != 4:
            return found
        last = (*maps.y.pixels, maps.y.channel_count)
        return maps.in_layout_of_y(found, "last" if shape[1:] == last else "first")

    def each(self, outputs: jax.Array, batch: Arrays, training: bool) -> Each:
        of_y = outputs.reshape(len(outputs), *self._points.shape)
        target_mean = jnp.asarray(self._target_mean, self._dtype)
        weights = self._points.point_weights
        of_points = None if weights is None else jnp.asarray(weights, self._dtype)
        target = batch["y"].astype(self._dtype)
        return self._points.each(of_y, target, target_mean, jnp, of_points)


class JaxMultilabel:
    """Logits (n, labels), y uint8 (n, labels). Images are uint8 (n, H, W, C)."""

    def __init__(self, inputs: JaxInputs, bins: int) -> None:
        self._inputs = inputs
        self._edges = edges_of_bins(bins)

    def inputs(self, batch: Arrays) -> jax.Array:
        return self._inputs(batch["x"])

    def each(self, outputs: jax.Array, batch: Arrays, training: bool) -> Each:
        loss = (jnp.logaddexp(0.0, outputs) - batch["y"].astype(outputs.dtype) * outputs).mean(1)
        return Each(loss, terms(outputs, jax.nn.sigmoid(outputs), batch["y"] > 0, self._edges))


class JaxSegmentation:
    """Logits (n, classes, H, W), which a model may also return as (n, H, W, classes); y (n, H, W).
    The model gets images (n, H, W, C)."""

    counts_exactly = True

    def __init__(
        self,
        inputs: JaxInputs,
        classes: int,
        pixels: tuple[int, int],
        ignored: int | None,
        dice: float,
        weights: Sequence[float] | None,
        *,
        turned: bool,
    ) -> None:
        """turned: whether float images (n, C, H, W) become (n, H, W, C)."""
        self._inputs = inputs
        self._classes = classes
        self._pixels = pixels
        self._ignored = ignored
        self._dice = dice
        self._weights = weights
        self._turned = turned

    def inputs(self, batch: Arrays) -> jax.Array:
        x = self._inputs(batch["x"])
        return x.transpose(0, 2, 3, 1) if self._turned else x

    def outputs_of(self, found: Any) -> Any:
        """Converts the model's outputs to the form that each() expects."""
        is_last = getattr(found, "shape", ())[1:] == (*self._pixels, self._classes)
        return jnp.moveaxis(found, 3, 1) if is_last else found

    def each(self, outputs: jax.Array, batch: Arrays, training: bool) -> Each:
        y = batch["y"]
        # (n, H, W)
        counts = jnp.ones(y.shape, bool) if self._ignored is None else y != self._ignored
        labels = jnp.where(counts, y, 0)
        pixels = counts.sum((1, 2))
        of_labels = jnp.take_along_axis(jax.nn.log_softmax(outputs, axis=1), labels[:, None], 1)[
            :, 0
        ]
        if self._weights is not None:
            of_labels = of_labels * jnp.asarray(self._weights, outputs.dtype)[labels]
        loss = jnp.where(counts, -of_labels, 0.0).sum((1, 2))
        if self._dice:
            loss = loss + self._dice * pixels.astype(loss.dtype) * (
                1.0 - self._dice_of_each(outputs, labels, counts)
            )
        return Each(
            loss,
            {
                "pixels": pixels,
                "confusion": self._confusion(jax.lax.stop_gradient(outputs), labels, counts),
            },
        )

    def _dice_of_each(self, outputs: jax.Array, labels: jax.Array, counts: jax.Array) -> jax.Array:
        """Returns (n,), as in TorchSegmentation."""
        shares = jax.nn.softmax(outputs, axis=1) * counts[:, None]
        is_there = (
            jax.nn.one_hot(labels, self._classes, dtype=outputs.dtype, axis=1) * counts[:, None]
        )
        area = is_there.sum((2, 3))  # (n, classes)
        each = 2.0 * (shares * is_there).sum((2, 3)) / jnp.maximum(shares.sum((2, 3)) + area, 1e-30)
        return jnp.where(area > 0, each, 0.0).sum(1) / jnp.maximum((area > 0).sum(1), 1).astype(
            outputs.dtype
        )

    def _confusion(self, outputs: jax.Array, labels: jax.Array, counts: jax.Array) -> jax.Array:
        """Returns integers (n, classes ** 2): numbers of pixels by [label, prediction]."""
        cells = (labels * self._classes + outputs.argmax(1)).reshape(len(labels), -1)
        rows = jnp.arange(len(labels))[:, None]
        return (
            jnp.zeros((len(labels), self._classes**2), jnp.int32)
            .at[rows, cells]
            .add(counts.reshape(cells.shape).astype(jnp.int32))
        )


class JaxLanguage:
    """Tokens (n, T + 1); logits (n, T, outputs), at least one for each token of the vocabulary."""

    def __init__(self, ignore: int | None, smoothing: float) -> None:
        self._ignore = ignore
        self._smoothing = smoothing

    def inputs(self, batch: Arrays) -> jax.Array:
        """Returns the input tokens, int32 (n, T)."""
        return batch["tokens"][:, :-1]

    def each(self, outputs: jax.Array, batch: Arrays, training: bool) -> Each:
        targets = batch["tokens"][:, 1:]  # (n, T)
        log_shares = jax.nn.log_softmax(outputs)
        loss = -jnp.take_along_axis(log_shares, targets[..., None], 2)[..., 0]
        if training and self._smoothing:
            loss = (1.0 - self._smoothing) * loss - self._smoothing * log_shares.mean(2)
        is_predicted = (
            jnp.ones_like(targets, bool) if self._ignore is None else targets != self._ignore
        )
        return Each(jnp.where(is_predicted, loss, 0.0).sum(1), {"tokens": is_predicted.sum(1)})


class JaxFunctions:
    """A loss (outputs, batch) -> (n,). Images are (n, H, W, C)."""

    def __init__(
        self, loss: UserLoss, inputs: JaxInputs, fields: Mapping[str, Field], place: DeviceAndDtype
    ) -> None:
        if loss.ignore is not None or "class" in loss.facts:
            raise UserError(
                "loss is a torch module",
                "hvdtrain.train(), loss",
                "a function of JAX arrays, or framework=torch",
            )
        self._loss = loss
        self._inputs = inputs
        self._fields = fields
        self._dtype = place.dtype

    def inputs(self, batch: Arrays) -> jax.Array:
        return self._inputs(batch["x"])

    def batch_for_user(self, batch: Arrays) -> dict[str, jax.Array]:
        of_others = {
            name: as_given(batch[name], field, self._dtype)
            for name, field in self._fields.items()
            if name != "x"
        }
        return {"x": self.inputs(batch), **of_others}

    def each(self, outputs: Any, batch: Arrays, training: bool) -> Each:
        loss = self._loss.of(outputs, self.batch_for_user(batch))
        samples = len(batch["x"])
        if tuple(getattr(loss, "shape", ("no array",))) != (samples,):
            found = tuple(getattr(loss, "shape", (type(loss).__name__,)))
            fix = (
                "one number for each sample: hvdtrain takes the mean over the samples of all ranks"
            )
            raise UserError(
                f"loss returns {found} for {samples} samples, not ({samples},)",
                "hvdtrain.train(), loss",
                fix,
            )
        return Each(loss, {})


class JaxMeasured:
    """A part with the terms of user-defined metrics."""

    def __init__(self, part: TaskPart, metrics: UserMetrics, place: DeviceAndDtype) -> None:
        refuse_parts(metrics)
        self._part = part
        self._metrics = metrics
        self.inputs = part.inputs
        self.outputs_of = outputs_of(part)
        self.counts_exactly = counts_exactly(part)
        self.parts_of = getattr(part, "parts_of", None)  # of task.metrics

    def each(self, outputs: Any, batch: Arrays, training: bool) -> Each:
        each = self._part.each(outputs, batch, training)
        fields = self._part.batch_for_user(batch) if isinstance(self._part, JaxFunctions) else batch
        own = terms_of(self._metrics, jax.lax.stop_gradient(outputs), fields, len(each.loss), _rows)
        return each._replace(terms={**each.terms, **own})


def _rows(value: Any, samples: int, whole: bool) -> jax.Array:
    """Converts to an array. Rejects one number for all samples, which would count padding."""
    return jnp.asarray(value)
