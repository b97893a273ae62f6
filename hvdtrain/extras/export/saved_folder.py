"""Writes a model of transformers as a folder for from_pretrained(), and its adapters as a folder
for PEFT."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hvdtrain.core.adapters import A, B, is_adapter, is_transposed, merged
from hvdtrain.core.arrays import Arrays


@dataclass(frozen=True)
class AdapterOptions:
    """The options of a run's adapters."""

    rank: int
    alpha: float
    dropout: float


def save_merged(model: Any, folder: Path, scale: float | None) -> None:
    """Writes config.json, model.safetensors and what else save_pretrained() writes. scale: of the
    adapters, which are merged into their weights; None without adapters."""
    state = model.state_dict()
    if scale is not None:
        state = _tensors(merged(_arrays(state), scale), state)
    _save(model, folder, state)


def save_base(model: Any, folder: Path) -> None:
    """Writes the model without its adapters."""
    state = {name: x for name, x in model.state_dict().items() if not is_adapter(name)}
    _save(model, folder, state)


def _save(model: Any, folder: Path, state: Mapping[str, torch.Tensor]) -> None:
    transformers: Any = sys.modules["transformers"]
    bars = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()
    has_cache = hasattr(model.config, "use_cache")
    try:
        if has_cache:  # training turns it off
            model.config.use_cache = True
        model.save_pretrained(folder, state_dict=dict(state))
    finally:
        if has_cache:
            model.config.use_cache = False
        if bars:
            transformers.utils.logging.enable_progress_bar()


def save_adapters(model: Any, folder: Path, options: AdapterOptions, base: str) -> None:
    """Writes adapter_config.json and adapter_model.safetensors, as PEFT reads them. Modules that
    are trained besides the adapters are written whole.

    base: the folder of the model without adapters
    """
    from safetensors.torch import save_file

    state = {name: x.detach().cpu() for name, x in model.state_dict().items()}
    layers = [name.removesuffix(A) for name in state if name.endswith(A)]
    found: dict[str, torch.Tensor] = {}
    transposed = False
    for layer in layers:
        a = state[layer + A]
        b = state[layer + B]
        is_conv1d = is_transposed(tuple(a.shape), tuple(b.shape), state[f"{layer}.weight"].shape)
        found[f"{layer}{A}.weight"] = a.T if is_conv1d else a  # (rank, inputs)
        found[f"{layer}{B}.weight"] = b.T if is_conv1d else b  # (outputs, rank)
        transposed = transposed or is_conv1d
    beside = _trained_modules(model)
    for module in beside:
        found |= {name: x for name, x in state.items() if name.startswith(f"{module}.")}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if model.can_generate() else None,
        "base_model_name_or_path": base,
        "r": options.rank,
        "lora_alpha": options.alpha,
        "lora_dropout": options.dropout,
        "target_modules": layers,
        "modules_to_save": beside or None,
        "fan_in_fan_out": transposed,
        "bias": "none",
        "inference_mode": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    tensors = {f"base_model.model.{name}": x.contiguous().clone() for name, x in found.items()}
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})


def _trained_modules(model: torch.nn.Module) -> list[str]:
    """Returns the names of the modules whose own parameters are trained, and are not adapters."""
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    return list(dict.fromkeys(name.rpartition(".")[0] for name in names if not is_adapter(name)))


def _arrays(state: Mapping[str, torch.Tensor]) -> Arrays:
    """Returns arrays by name; tensors that share storage are one array."""
    arrays: dict[int, np.ndarray] = {}
    return {
        name: arrays.setdefault(x.data_ptr(), x.detach().cpu().numpy()) if x.numel() else x.numpy()
        for name, x in state.items()
    }


def _tensors(
    arrays: Mapping[str, np.ndarray], state: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Returns tensors by name; those that were not changed are the ones of the model."""
    tensors = {}
    for name, array in arrays.items():
        own = state[name]
        is_own = array.ctypes.data == own.data_ptr()
        tensors[name] = own if is_own else torch.from_numpy(array)
    return tensors
