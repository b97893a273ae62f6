"""python -m hvdtrain export: the weights of one checkpoint of a run, in a file of their own, for inference elsewhere."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from hvdtrain.cli.export.read import about, own_names, read
from hvdtrain.config.read import nearest
from hvdtrain.core.arrays import Arrays
from hvdtrain.errors import DONE, UserError
from hvdtrain.train.checkpoint import files
from hvdtrain.train.progress.train_state import TrainState
from hvdtrain.version import __version__

USAGE = """\
python -m hvdtrain export RUN --to FILE [--checkpoint newest] [--force]
  RUN            the run folder, which has checkpoints/
  --to           the file to write: model.safetensors, or model.pt for torch.load
  --checkpoint   newest (the default), best (by validation accuracy), or one by name: step-00000120
  --force        replaces FILE where there is one"""
_CALL = USAGE.partition("\n")[0]


def export(words: Sequence[str]) -> int:
    """The command behind `export`; returns the exit code."""
    if not words or {"-h", "--help"} & set(words):
        print(USAGE)
        return DONE
    asked = _parse(words)
    run, to = Path(os.path.expanduser(asked.run)), Path(os.path.expanduser(asked.to))
    _check_target(to, asked.force)
    found, arrays, skipped = read(run, asked.checkpoint)
    weights = own_names(arrays, found)
    told, notes = about(run, found)
    size_bytes = _write(to, weights, {"format": "pt", "hvdtrain": __version__} | told)
    numbers = sum(array.size for array in weights.values())
    sizes = f"{len(weights)} arrays, {numbers:,} numbers, {size_bytes / 1e6:,.1f} MB"
    first = f"{found.folder.name} of {run} ({_reached(found.train_state)}) -> {to}: {sizes}"
    print("\n".join([*skipped, *notes, first, *_use(to, told)]))
    return DONE


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(message, "command line of export", _CALL)


def _parse(words: Sequence[str]) -> argparse.Namespace:
    parser = _Parser(prog="python -m hvdtrain export", add_help=False, allow_abbrev=False)
    parser.add_argument("run", nargs="?")
    parser.add_argument("--to")
    parser.add_argument("--checkpoint", default="newest")
    parser.add_argument("--force", action="store_true")
    asked, rest = parser.parse_known_args(words)
    if rest:
        fix = nearest(rest[0].partition("=")[0], ["--to", "--checkpoint", "--force"])
        raise UserError(f"cannot read the word '{rest[0]}'", "command line of export", f"{fix}; {_CALL}")
    for name, value in {"RUN": asked.run, "--to": asked.to}.items():
        if value is None:
            raise UserError(f"{name} is missing", "command line of export", _CALL)
    return asked


def _check_target(to: Path, force: bool) -> None:
    """Before anything is read."""
    if to.suffix not in (".safetensors", ".pt"):
        raise UserError(f"{to} ends neither in .safetensors nor in .pt", "--to", "as in --to model.safetensors")
    if not os.path.isdir(to.parent):  # unlike Path.is_dir, False where permission is lacking
        raise UserError(f"there is no folder {to.parent}", "--to", f"mkdir -p {to.parent}")
    if os.path.isdir(to):
        raise UserError(f"{to} is a folder", "--to", "give the name of a file")
    if os.path.lexists(to) and not force:
        raise UserError(f"{to} is there already", "--to", "--force replaces it; or give another name")


def _write(to: Path, weights: Arrays, told: dict[str, str]) -> int:
    """Whole or not there; its size in bytes. A file for torch.load tells nothing of itself: it is a plain state_dict."""
    unfinished = to.with_name(f".{to.name}.{os.getpid()}.unfinished")
    try:
        unfinished.open("xb").close()
        mode = unfinished.stat().st_mode  # by the user's umask; safetensors makes files that nobody else may read
        if to.suffix == ".pt":
            from hvdtrain.frameworks.torch import export

            export.save(weights, unfinished)
        else:
            _save(unfinished, weights, told)
        unfinished.chmod(mode)
        files.sync(unfinished)
        unfinished.replace(to)
        files.sync(to.parent)
        return to.stat().st_size
    except OSError as error:
        raise UserError(f"cannot write {to}: {error.strerror or error}", "--to", "give a folder that can be written, with room") from None
    finally:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)


def _save(path: Path, weights: Arrays, told: dict[str, str]) -> None:
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    try:
        save_file(weights, path, metadata=told)
    except SafetensorError as error:  # its form of an OSError
        raise OSError(str(error)) from error


def _reached(train_state: TrainState) -> str:
    epochs = f"epoch {train_state.progress.epochs:.2f}"
    if math.isnan(train_state.accuracy):
        return f"{epochs}, not evaluated yet"
    of = "" if train_state.evaluated == train_state.progress.step else f" of step {train_state.evaluated}"
    return f"{epochs}, validation accuracy {train_state.accuracy:.4f}{of}"


def _use(to: Path, told: dict[str, str]) -> list[str]:
    """What the model is, what goes into it, and two lines of Python."""
    known = [f"{name} {told.get(name, 'unknown'):.200}" for name in ("mean", "std", "image_shape", "classes")]
    lines = [f"model    {told['model']:.500} of framework {told['framework']!r:.20}"] if "model" in told else []
    lines.append(f"input    (pixels / 255 - mean) / std: {', '.join(known)}")
    path, torch = json.dumps(str(to)), told.get("framework", "torch") == "torch"
    if to.suffix == ".pt":
        first, weights = "import torch", f"torch.load({path}, weights_only=True)"
    else:
        first, weights = f"from safetensors.{'torch' if torch else 'numpy'} import load_file", f"load_file({path})"
    return [*lines, f"load it  {first}", f"         {f'model.load_state_dict({weights})' if torch else f'weights = {weights}'}"]
