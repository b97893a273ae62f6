"""Checkpoints: arrays as safetensors, numbers as JSON, never a pickle; written by rank 0 under another name and then renamed."""

from __future__ import annotations

import json
import math
import os
import shutil
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hvdtrain.errors import UserError
from hvdtrain.state import Arrays, Progress

FORMAT = 1


@dataclass(frozen=True)
class Standing:
    """How far a job is: with the seed and the arrays, all that is needed to go on."""

    progress: Progress
    seconds: float = 0.0  # spent in this job so far, over all its runs
    at_target: int = 0  # epochs in a row, up to now, at the accuracy `target`
    target: float | None = None
    accuracy: float = math.nan  # of the last evaluation


def save(run: Path, standing: Standing, arrays: Arrays, seed: int, keep_last: int) -> Path:
    """Writes checkpoints/step-00000120/{weights,slots}.safetensors and progress.json; removes all but the newest `keep_last`."""
    from safetensors.numpy import save_file

    folder = run / "checkpoints" / f"step-{standing.progress.step:08d}"
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    save_file({k: v for k, v in arrays.items() if not k.startswith("s.")}, unfinished / "weights.safetensors")
    save_file({k: v for k, v in arrays.items() if k.startswith("s.")}, unfinished / "slots.safetensors")
    (unfinished / "progress.json").write_text(json.dumps({"format": FORMAT, "seed": seed} | asdict(standing), indent=2) + "\n")
    if folder.exists():  # the same step again: the job was resumed from an older one
        os.replace(folder, folder.with_name(f".{folder.name}.old"))
    os.replace(unfinished, folder)
    shutil.rmtree(folder.with_name(f".{folder.name}.old"), ignore_errors=True)
    for old in _finished(run)[:-keep_last]:
        shutil.rmtree(old)
    return folder


def newest(run: Path) -> Path:
    """The folder of the newest finished checkpoint of a run."""
    found = _finished(run)
    if not found:
        raise UserError(f"no checkpoint in {run}", "resume", "give the run folder: it has a folder checkpoints/step-...")
    return found[-1]


def load(folder: Path, dataset: int, seed: int, total: int) -> tuple[Standing, Arrays]:
    """The standing and the arrays of one checkpoint; `total` is this job's, which may have more epochs than the saved one."""
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        standing, saved_seed = _read_standing(json.loads((folder / "progress.json").read_text()))
        arrays = load_file(folder / "weights.safetensors") | load_file(folder / "slots.safetensors")
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise UserError(
            f"cannot read the checkpoint: {type(error).__name__}: {error}", str(folder), "resume from another run folder"
        ) from None
    for name, found, wanted in (("training set of samples", standing.progress.dataset, dataset), ("seed", saved_seed, seed)):
        if found != wanted:
            fix = "give the data and seed that the run folder's config.yaml names"
            raise UserError(f"the checkpoint has another {name}: {found}, this job has {wanted}", str(folder), fix)
    progress = Progress(dataset, total, standing.progress.step, standing.progress.samples)
    return replace(standing, progress=progress), arrays


def _read_standing(saved: dict[str, Any]) -> tuple[Standing, int]:
    """(standing, seed); ValueError, KeyError or TypeError where a number is missing or is none."""
    if saved["format"] != FORMAT:
        raise ValueError(f"format {saved['format']}, this version reads {FORMAT}")
    counts = [saved["progress"][name] for name in ("dataset", "total", "step", "samples")]
    counts += [saved["at_target"], saved["seed"]]
    if not all(type(count) is int and count >= 0 for count in counts) or not counts[0]:
        raise ValueError(f"counts that cannot be: {counts}")
    target = None if saved["target"] is None else float(saved["target"])
    return Standing(Progress(*counts[:4]), float(saved["seconds"]), counts[4], target, float(saved["accuracy"])), counts[5]


def _finished(run: Path) -> list[Path]:
    """Folders of whole checkpoints, by step."""
    found = [path for path in (run / "checkpoints").glob("step-*") if path.name.removeprefix("step-").isdecimal()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))
