"""The learner of several models in the framework of a custom loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hvdtrain.comm.mesh import Mesh
from hvdtrain.config.schema import Config
from hvdtrain.errors import UserError
from hvdtrain.frameworks.user_loop import Words


def models_in_turn(config: Config, mesh: Mesh, words: Words, on_step: Callable[[], None]) -> Any:
    """Creates the LoopLearner of several models with names: add(name, model, optimizer) prepares
    each. on_step: called after the first step of each batch."""
    if config.framework != "torch":
        raise UserError(
            f"framework={config.framework} supports only one model",
            "ctx.prepare(..., name=)",
            f"leave name= out, and prepare {words.one}",
        )
    # imports torch
    from hvdtrain.extras.in_turn.models import ModelsInTurn

    return ModelsInTurn(config, mesh, on_step)
