"""use_norm changes which statistics the norms of a model use, and nothing else about it."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch import nn

from hvdtrain.comm.communicator import SingleProcessCommunicator
from hvdtrain.errors import UserError
from hvdtrain.extras.batch_norms.ghost import GhostBatchNorm
from hvdtrain.extras.batch_norms.sync import SyncBatchNorm
from hvdtrain.extras.batch_norms.use_norm import use_norm
from hvdtrain.frameworks.torch.models import linear


def tied() -> nn.Module:
    """Norms in lists and dictionaries, one of them in two places, beside norms of other kinds; in a
    state that is not the first."""
    torch.manual_seed(3)
    twice = nn.BatchNorm1d(6, eps=0.1, momentum=0.2)
    branch = nn.ModuleDict(
        {
            "sync": nn.SyncBatchNorm(6),
            "bare": nn.BatchNorm1d(6, affine=False, track_running_stats=False),
        }
    )
    model = nn.Sequential(
        nn.Linear(6, 6),
        twice,
        nn.ModuleList([nn.LayerNorm(6), nn.GroupNorm(2, 6), twice]),
        branch,
        nn.BatchNorm3d(2),
    )
    for tensor in [*model.parameters(), *model.buffers()]:
        tensor.data.add_(torch.rand(()).to(tensor.dtype))
    branch.eval()
    model[1].weight.requires_grad_(False)
    return model.double()


@pytest.mark.parametrize(("kind", "made"), [("ghost", GhostBatchNorm), ("sync", SyncBatchNorm)])
def test_the_switch_keeps_everything_but_the_statistics(
    kind: Literal["ghost", "sync"], made: type
) -> None:
    model = tied()
    before = tied()
    parameters = list(model.parameters())
    assert use_norm(model, kind, 4, "averaged", SingleProcessCommunicator()) is model
    assert [type(m) for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)] == [
        made
    ] * 4
    assert model[1] is model[2][2]
    assert [type(m) for m in model[2]] == [nn.LayerNorm, nn.GroupNorm, made]
    assert list(model.state_dict()) == list(before.state_dict())
    # an optimizer made before still fits
    assert all(p is q for p, q in zip(model.parameters(), parameters, strict=True))
    for (name, tensor), other in zip(
        model.state_dict().items(), before.state_dict().values(), strict=True
    ):
        assert torch.equal(tensor, other), name
        assert tensor.dtype == other.dtype
    for path, old in before.named_modules():
        if isinstance(old, nn.modules.batchnorm._BatchNorm):
            new = model.get_submodule(path)
            for setting in (
                "num_features",
                "eps",
                "momentum",
                "affine",
                "track_running_stats",
                "training",
            ):
                assert getattr(new, setting) == getattr(old, setting), (path, setting)
    assert not model[1].weight.requires_grad
    model.load_state_dict(before.state_dict())


def test_plain_statistics_leave_the_model_alone() -> None:
    model = tied()
    before = list(model.modules())
    assert use_norm(model, "batch", 4, "averaged", SingleProcessCommunicator()) is model
    assert list(model.modules()) == before
    plain = linear.build("linear", (8, 8, 1), 10)
    # without a norm there is nothing to choose
    assert use_norm(plain, "batch", 4, "averaged", SingleProcessCommunicator()) is plain


class Scaled(nn.BatchNorm2d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (
            linear.build("linear", (8, 8, 1), 10),
            [
                "the model has no batch norm layer, so norm.kind has no effect",
                "norm.kind=ghost",
                "fix: norm.kind=batch",
            ],
        ),
        (
            nn.Sequential(nn.LazyBatchNorm2d()),
            ["0 (LazyBatchNorm2d) has no fixed number of channels yet", "nn.BatchNorm2d(64)"],
        ),
        (
            nn.Sequential(Scaled(3)),
            [
                "0 (Scaled) overrides the computation of batch norm, which norm.kind=ghost would "
                "replace",
                "fix: norm.kind=batch, or torch's own",
            ],
        ),
    ],
)
def test_what_use_norm_refuses(model: nn.Module, words: list[str]) -> None:
    with pytest.raises(UserError) as error:
        use_norm(model, "ghost", 4, "averaged", SingleProcessCommunicator())
    for word in words:
        assert word in str(error.value)
