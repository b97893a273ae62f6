"""The outputs of an evaluation: of one call of the model, or, with evaluate.views, the mean over
several views of each image, which an extra computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hvdtrain.config.schema import Config
from hvdtrain.core.extras import implementing_module
from hvdtrain.data.field import Field


class Averaging:
    """How an evaluation computes outputs: by default with one call of the model."""

    def mean(
        self,
        arrays: Mapping[str, Any],
        outputs_of: Callable[[Mapping[str, Any]], Any],
        xp: Any,
        axes: tuple[int, int] | None = None,
    ) -> Any:
        """Returns outputs_of(arrays), or a mean of it over changed "x".

        xp: numpy, jax.numpy or torch, whichever "x" belongs to; axes: height and width of "x", if
        they differ from the axes of the data.
        """
        return outputs_of(arrays)


def averaging_of(config: Config, fields: Mapping[str, Field]) -> Averaging:
    """Returns how evaluations of samples of these fields compute outputs. Raises UserError for
    evaluate.views with fields that are not images."""
    if config.evaluate.views == 1:
        return Averaging()
    averaging: Averaging = implementing_module("evaluate.views").make_views(config, fields)
    return averaging
