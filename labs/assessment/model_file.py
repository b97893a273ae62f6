"""Reads the weights that a submission saved, and nothing but weights; computes what the network
says with them."""

from __future__ import annotations

import stat
import warnings
import zipfile
from pathlib import Path

import numpy as np
import torch
from judge import Answers
from net import Net
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy

from hvdtrain.data.channel_stats import ChannelStats
from hvdtrain.errors import first_line, short

NAMES = ("model.safetensors", "model.npz", "model.pt")
_BATCH = 500
_REAL = (
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
)


class WrongModel(Exception):
    """A file that is no state of the network; the message says why."""


def find(folder: Path) -> Path | None:
    """The model's file: the first of NAMES that is there."""
    return next((folder / name for name in NAMES if _is_plain_file(folder / name)), None)


def _is_plain_file(path: Path) -> bool:
    """No link, pipe, device or folder, and in a folder that can be read."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False


def load(path: Path, net: Net) -> None:
    """Puts the file's weights into the network. Raises WrongModel."""
    expected = net.state_dict()
    most = 2 * sum(tensor.numel() * 8 for tensor in expected.values()) + 2**20
    if path.stat().st_size > most:
        raise WrongModel(
            f"{path.name} has {path.stat().st_size:,} bytes; the network's state has at most "
            f"{most:,}"
        )
    try:
        found = _tensors(path, most)
    except Exception as error:  # each format has errors of its own
        raise WrongModel(f"{path.name} cannot be read: {first_line(error)}") from error
    if odd := [name for name, tensor in found.items() if not _is_plain(tensor)]:
        raise WrongModel(f"{path.name}: {short(str(odd[0]), 40)} is no array of real numbers")
    wrong = [f"{name} is missing" for name in expected if name not in found]
    wrong += [
        f"{short(str(name), 40)} is not the network's" for name in found if name not in expected
    ]
    wrong += [
        f"{name} is {tuple(found[name].shape)}, expected {tuple(tensor.shape)}"
        for name, tensor in expected.items()
        if name in found and found[name].shape != tensor.shape
    ]
    wrong += [
        f"{name} has values that are not finite"
        for name in expected
        if name in found and not _is_finite(found[name])
    ]
    if wrong:
        more = f"; and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise WrongModel(f"{path.name}: {'; '.join(wrong[:3])}{more}")
    net.load_state_dict(found)


def _tensors(path: Path, most: int) -> dict[str, torch.Tensor]:
    """By name. No format here can run code: safetensors, arrays without pickle, and torch's reader
    of weights alone."""
    if path.suffix == ".safetensors":
        return load_file(path)
    _check_archive(path, most)
    if path.suffix == ".npz":
        with np.load(path, allow_pickle=False) as arrays:
            return {name: torch.from_numpy(arrays[name]) for name in arrays.files}
    with warnings.catch_warnings():
        # torch 2.14: of sparse tensors, which are no array of real numbers here
        warnings.simplefilter("ignore")
        found = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(found, dict) or not all(
        isinstance(name, str) and isinstance(value, torch.Tensor) for name, value in found.items()
    ):
        raise ValueError("expected a state_dict: a mapping of names to tensors")
    return dict(found)


def _check_archive(path: Path, most: int) -> None:
    """Raises ValueError where it is no zip archive, or has more in it than its size tells: nothing
    is decompressed for that."""
    if not zipfile.is_zipfile(path):
        raise ValueError("no zip archive, as numpy.savez and torch.save write")
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
    if any(
        entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) for entry in entries
    ):
        raise ValueError("it is compressed in another way than by numpy.savez_compressed")
    if (held := sum(entry.file_size for entry in entries)) > most:
        raise ValueError(f"it holds {held:,} bytes; the network's state has at most {most:,}")


def _is_plain(tensor: torch.Tensor) -> bool:
    """No sparse one, none without memory, and of numbers that the network's own can be."""
    return (
        tensor.layout == torch.strided
        and tensor.device.type == "cpu"
        and not tensor.is_nested
        and tensor.dtype in _REAL
    )


def _is_finite(tensor: torch.Tensor) -> bool:
    return not tensor.is_floating_point() or bool(tensor.isfinite().all())


def answers(net: Net, x: np.ndarray, y: np.ndarray, stats: ChannelStats) -> Answers:
    """Of images uint8 (n, C, H, W) of classes (n,). Raises WrongModel where a logit is not
    finite."""
    mean, std = (torch.tensor(value, dtype=torch.float32)[:, None, None] for value in stats)
    net.eval()
    right = []
    loss = []
    with torch.no_grad():
        for start in range(0, len(y), _BATCH):
            images = torch.from_numpy(x[start : start + _BATCH])
            labels = torch.from_numpy(y[start : start + _BATCH])
            logits = net((images.float() / 255 - mean) / std).double()  # (n, classes)
            if not logits.isfinite().all():
                raise WrongModel("the network's output is not finite")
            right.append(logits.argmax(1) == labels)
            loss.append(cross_entropy(logits, labels, reduction="none"))
    return Answers(torch.cat(right).numpy(), torch.cat(loss).numpy())
