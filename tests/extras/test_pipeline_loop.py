"""The model of a custom loop in stages: what its calls compute, and what they refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hvdtrain.comm.communicator import SingleProcessCommunicator
from hvdtrain.comm.mesh import one_group
from hvdtrain.errors import UserError
from hvdtrain.extras.pipeline.loop_passes import InStages


def test_calls_of_a_model_in_stages_that_compute_nothing() -> None:
    pipelined: Any = None  # which no call here comes to
    model = InStages(
        torch.nn.Linear(2, 1), pipelined, one_group(SingleProcessCommunicator()), torch.float32
    )
    x = torch.ones(3, 2)
    with pytest.raises(UserError, match="no rank has all layers of the model"):
        model(x)
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(UserError, match="has no effect on its stages"),
    ):
        model(x)
    with pytest.raises(UserError, match="did not call the model"):
        model._inputs_of(x, lambda part: part.sum())
    assert model._inputs_of(x, lambda part: model(part * 2).sum()).tolist() == (x * 2).tolist()
    assert model._loss(x, torch.full((3, 1), 5.0), lambda part: model(part).sum()) == 15
    with pytest.raises(UserError, match="calls the model twice"):
        model._loss(x, torch.ones(3, 1), lambda part: model(part) + model(part))
