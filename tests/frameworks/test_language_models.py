"""Language models of transformers: adapters of Conv1D, with transformers' own modules as the
reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

import hvdtrain
from hvdtrain.core.adapters import is_adapter, merged
from hvdtrain.core.import_torchvision import define_missing_operators
from hvdtrain.data.source import NamedArrays
from hvdtrain.errors import UserError

define_missing_operators()  # transformers imports torchvision
transformers: Any = pytest.importorskip(
    "transformers", reason="transformers is not installed: make test-keras"
)

VOCABULARY = 50
WORDS = [
    "task.name=language",
    "optim.name=sgd",
    "optim.momentum=0",
    "optim.base_lr=0.5",
    "speed.precision=fp64",
    "log.display=lines",
]
TOKENS = np.random.default_rng(1).integers(0, VOCABULARY, (24, 13))
DATA = NamedArrays({"tokens": TOKENS}, {"tokens": VOCABULARY})


@pytest.fixture(autouse=True)
def quiet() -> None:
    transformers.utils.logging.disable_progress_bar()


def gpt2() -> Any:
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 16, "vocab_size": VOCABULARY}
    no_dropout = {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **no_dropout, **ends))


def saved(model: Any, folder: Path) -> Path:
    """A folder of save_pretrained(), whose weights are those of no constructor."""
    torch.manual_seed(7)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn_like(p))
    model.save_pretrained(folder)
    return folder


def loaded(folder: Path, kind: str = "AutoModelForCausalLM") -> Any:
    return getattr(transformers, kind).from_pretrained(folder, dtype=torch.float64).eval()


LORA = ["model.lora=['*c_attn','*c_fc','*c_proj']", "model.lora_rank=4", "model.lora_alpha=8"]


def test_adapters_of_conv1d_train_as_their_formula(tmp_path: Path) -> None:
    """W + 2 A B by torch's own gradient, with the model of the library; a job begins with the sum,
    or trains the adapters further.

    PEFT with the same adapters and fan_in_fan_out=True gave the same numbers to 3e-17.
    """
    folder = saved(gpt2(), tmp_path / "folder")
    words = [*WORDS, f"model.name=transformers:{folder}", "batch.size=24"]
    trained = [*words, *LORA, f"model.weights={folder}"]
    first, last = (
        hvdtrain.train(
            {"run": str(tmp_path / f"{steps}"), "stop.steps": steps},
            *trained,
            train_data=DATA,
            val_data=DATA,
        ).weights
        for steps in (1, 5)
    )
    model = loaded(folder)
    adapters = {
        # B is zero in the first step, so that A does not move
        name: torch.tensor(array if name.endswith("A") else 0 * array, requires_grad=True)
        for name, array in first.items()
        if is_adapter(name)
    }
    assert len(adapters) == 16
    weights = dict(model.named_parameters())
    tokens = torch.from_numpy(TOKENS)

    def whole() -> dict[str, torch.Tensor]:
        layers = [name.removesuffix(".lora_A") for name in adapters if name.endswith(".lora_A")]
        return weights | {
            f"{layer}.weight": weights[f"{layer}.weight"]
            + 2 * adapters[f"{layer}.lora_A"] @ adapters[f"{layer}.lora_B"]
            for layer in layers
        }

    for _ in range(5):
        logits = torch.func.functional_call(model, whole(), (tokens[:, :-1],)).logits
        functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        with torch.no_grad():
            for p in adapters.values():
                assert p.grad is not None
                p.sub_(0.5 * p.grad)
                p.grad = None
    for name, p in adapters.items():
        np.testing.assert_allclose(last[name], p.detach().numpy(), rtol=0, atol=1e-14, err_msg=name)
    assert max(np.abs(array).max() for name, array in last.items() if name.endswith("B")) > 0.01
    expected = {name: p.detach().numpy() for name, p in whole().items()}
    of_run = merged(last, 2.0)
    for begun, same in ((words, expected), ([*words, *LORA], last)):
        run = hvdtrain.train(
            {"run": str(tmp_path / f"{len(begun)}"), "stop.steps": 1, "optim.base_lr": 0},
            *(word for word in begun if not word.startswith("optim.base_lr")),
            f"model.weights={tmp_path / '5'}",
            train_data=DATA,
            val_data=DATA,
        )
        assert set(same) <= run.weights.keys()
        for name, array in same.items():
            np.testing.assert_allclose(run.weights[name], array, rtol=0, atol=1e-14, err_msg=name)
    for name, array in expected.items():
        np.testing.assert_allclose(of_run[name], array, rtol=0, atol=1e-14, err_msg=name)
    for wrong, what in (
        ("model.lora_rank=32", "too large for a layer of 32 inputs and 32 outputs"),
        ("model.lora=['c_attn']", "'?c_attn'? matches no torch.nn.Linear or Conv1D of the model"),
    ):
        with pytest.raises(UserError, match=what):
            hvdtrain.train(
                {"run": str(tmp_path / "wrong")}, *trained, wrong, train_data=DATA, val_data=DATA
            )
