"""Models of timm by name; and what libraries may download while a job builds its model: nothing,
unless model.download says so."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import torch
from oracles import timm as _  # noqa: F401  # torchvision's operators, without which timm does not import beside a CPU build of torch
from rank_threads import ThreadRank, in_threads
from ranks import needs_extra

import hvdtrain
from hvdtrain.config.read import configure
from hvdtrain.errors import UserError
from hvdtrain.frameworks.torch.foreign.downloads import download_first

IMAGES = np.random.default_rng(0).integers(0, 256, (12, 32, 32, 1), np.uint8)
DATA = {"x": IMAGES, "y": np.arange(12) % 10}
WORDS = [
    "batch.size=12",
    "optim.name=sgd",
    "optim.base_lr=0",
    "speed.precision=fp64",
    "log.display=lines",
]
SMALL = {"depths": [1, 1, 1, 1], "dims": [8, 8, 12, 12]}
NET = [
    "model.name=timm:convnext_atto",
    *(f"model.{option}={value}".replace(" ", "") for option, value in SMALL.items()),
]


def train(run: Path, *words: str) -> Any:
    return hvdtrain.train(
        {"run": str(run), "stop.steps": 1}, *WORDS, *words, train_data=DATA, val_data=DATA
    )


@needs_extra("pretrained")
@needs_extra("trained_models")
def test_outputs_are_those_of_timm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Made for the channels and classes of the data; weights from a file."""
    import timm

    torch.manual_seed(0)
    net = timm.create_model("convnext_atto", num_classes=10, in_chans=1, **SMALL)
    torch.save(net.state_dict(), tmp_path / "net.pt")
    run = train(tmp_path / "run", *NET, f"model.weights={tmp_path / 'net.pt'}")
    assert "56 of 56 arrays are loaded" in capsys.readouterr().out
    with torch.no_grad():
        expected = net.double().eval()(torch.from_numpy(run.transform(IMAGES)).double()).numpy()
    np.testing.assert_allclose(hvdtrain.predict(run, IMAGES), expected, rtol=0, atol=1e-12)


def asks_the_hub(seen: str) -> torch.nn.Module:
    """A model whose code looks whether it may download."""
    Path(seen).write_text(f"{huggingface_hub.is_offline_mode()} {os.environ.get('HF_HUB_OFFLINE')}")
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(1024, 10))


def test_the_hub_is_offline_while_a_model_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    words = ["model.name=test_libraries:asks_the_hub", f"model.seen={tmp_path / 'seen'}"]
    for more, said in (([], "True 1"), (["model.download=true"], "False None")):
        train(tmp_path / f"run{len(more)}", *words, *more)
        assert (tmp_path / "seen").read_text() == said
        assert not huggingface_hub.is_offline_mode() and "HF_HUB_OFFLINE" not in os.environ


@pytest.mark.parametrize(
    ("words", "what", "fix"),
    [
        (
            ["model.name=timm:convnext_ato"],
            "timm has no model convnext_ato",
            "did you mean convnext_atto",
        ),
        ([*NET, "model.dephts=[1]"], "unexpected keyword argument 'dephts'", "timm.create_model"),
        (
            [*NET, "framework=jax"],
            "framework=jax does not support model.name=timm:convnext_atto",
            "framework=torch",
        ),
        (
            [*NET, "model.pretrained=true", "model.cache_dir={}"],
            "timm:convnext_atto downloads from the Hugging Face Hub",
            "model.download=true",
        ),
        (
            ["model.name=timm.models:convnext_atto", "model.pretrained=true", "model.cache_dir={}"],
            "downloads from the",
            "model.download=true",
        ),
        (
            ["model.name=timm:local-dir:{}"],
            "timm has no model local-dir:",
            "model.name=timm:NAME model.weights=FOLDER/",
        ),
        (
            [*NET, "model.pretrained_cfg={{url: 'file:///x'}}"],
            "names files or addresses",
            "model.weights=FILE",
        ),
        (
            [*NET, "model.checkpoint_path=/x.pth"],
            "model.checkpoint_path=/x.pth names files or addresses",
            "model.weights=FILE",
        ),
        (
            ["model.name=timm:hf_hub:nobody/{}"],
            "downloads from the Hugging Face Hub",
            "model.download=true",
        ),
    ],
)
def test_what_is_not_made(words: list[str], what: str, fix: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        train(
            tmp_path / "run",
            *(word.format(tmp_path.name if "hf_hub" in word else tmp_path) for word in words),
        )
    assert what in caught.value.what and fix in caught.value.fix, str(caught.value)


def reads(url: str) -> torch.nn.Module:
    return torch.nn.Linear(len(torch.hub.load_state_dict_from_url(url, progress=False)), 10)


def test_a_download_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "home"))
    words = ["model.name=test_libraries:reads", f"model.url={(tmp_path / 'none.pt').as_uri()}"]
    with pytest.raises(UserError, match="test_libraries:reads cannot download: .*none.pt"):
        train(tmp_path / "run", *words, "model.download=true")
    with pytest.raises(UserError, match="test_libraries:reads downloads file:///.*none.pt"):
        train(tmp_path / "run", *words)


def test_rank_0_downloads_before_the_others() -> None:
    """Its caches are full when they begin, and no number is drawn from the stream that they
    share."""
    order: list[int] = []

    def build(rank: int) -> None:
        time.sleep(0.3 * (rank == 0))
        order.append(rank)

    def of_rank(communicator: ThreadRank) -> None:
        download_first(
            configure(None, ["model.download=true"]), communicator, lambda: build(communicator.rank)
        )
        build(communicator.rank)

    in_threads(3, of_rank)
    assert order[0] == 0 and sorted(order) == [0, 0, 1, 2]
    order.clear()
    in_threads(
        3,
        lambda communicator: download_first(
            configure(None, []), communicator, lambda: build(communicator.rank)
        ),
    )
    assert not order
