"""hvdtrain.predict() and hvdtrain.evaluate(): a run's model on data of a script."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from hvdtrain.api import Script
from hvdtrain.config.sections.section import COMMAND_LINE, Given
from hvdtrain.errors import UserError
from hvdtrain.extras.trained_models.arguments import Arguments, read_former_run
from hvdtrain.extras.trained_models.of_data import (
    WITHOUT_TARGETS,
    AskedData,
    evaluate_data,
    predict_data,
)
from hvdtrain.training.failure import RankFailed
from hvdtrain.training.given import given_data
from hvdtrain.training.run_rank import ConnectedRank, on_connected_ranks

T = TypeVar("T")


def predict(
    run: str, data: Any, arguments: Sequence[str], script: Script, checkpoint: str
) -> np.ndarray:
    """Does what hvdtrain.predict() says."""
    given = {section: one for section, one in script.given.items() if section == "model"}
    has_loss = "task" in script.given and script.given["task"].name is not None
    names = [
        word
        for word in script.names
        if word.startswith("model.name=") or (":" in word and not has_loss)
    ]
    if not any(
        word.startswith("task.name=") for word in (*arguments, *names)
    ):  # else the code of a task of the user's own
        given["task"] = WITHOUT_TARGETS
    asked = AskedData(data, "data", "hvdtrain.predict()")
    return _ask(
        run,
        [*names, *arguments],
        given,
        asked,
        lambda rank: predict_data(rank, asked, checkpoint)[1],
        "prediction",
    )


def evaluate(
    run: str, data: Any, arguments: Sequence[str], script: Script, checkpoint: str
) -> dict[str, float]:
    """Does what hvdtrain.evaluate() says."""
    asked = AskedData(data, "data", "hvdtrain.evaluate()")
    return _ask(
        run,
        [*script.names, *arguments],
        script.given,
        asked,
        lambda rank: evaluate_data(rank, asked, checkpoint),
        "evaluation",
    )


def _ask(
    run: str,
    arguments: Sequence[str],
    given: Mapping[str, Given],
    asked: AskedData,
    work: Callable[[ConnectedRank], T],
    what: str,
) -> T:
    """Runs the work on the ranks of this script, with the run's configuration. Raises as
    hvdtrain.train()."""
    given = {**given, "data": given_data(asked.given, None)}
    words = [
        *arguments,
        *(
            f"{section}.name={one.name}"
            for section, one in given.items()
            if section != "model" and one.name is not None
        ),
    ]
    try:
        return on_connected_ranks(
            work,
            None,
            Arguments(run, {}, words).of_job(),
            read_former_run=read_former_run,
            from_script=True,
            given=given,
            what=what,
        )
    except UserError as error:
        error.where = error.where.replace(COMMAND_LINE, asked.where)
        raise
    except RankFailed as failed:
        sys.exit(failed.code)
