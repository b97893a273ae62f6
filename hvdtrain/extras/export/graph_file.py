"""hvdtrain export RUN --to model.pt2 or model.onnx: a model with its computation, which runs
without its code."""

from __future__ import annotations

import argparse
import importlib.util
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hvdtrain.config.read import expand
from hvdtrain.config.sections.section import Given
from hvdtrain.errors import DONE, UserError
from hvdtrain.extras.export.metadata import metadata
from hvdtrain.extras.export.weights import check_target, lines_of_fields
from hvdtrain.extras.trained_models.arguments import OF_A_FILE, read_former_run
from hvdtrain.extras.trained_models.of_data import WITHOUT_TARGETS, inputs_alone
from hvdtrain.extras.trained_models.saved_weights import load_checkpoint
from hvdtrain.features.optim import AVERAGES_WRITTEN
from hvdtrain.training.failure import RankFailed
from hvdtrain.training.run_rank import ConnectedRank, on_connected_ranks
from hvdtrain.version import __version__

# the run's values of these keys do not change what the model computes in evaluation
_PLAIN = ("speed.device=cpu", "speed.compile=none", "model.recompute=none", "norm.kind=batch")
_PACKAGES = ("onnx", "onnxscript", "onnxruntime")


def export_graph(options: argparse.Namespace) -> int:
    """Writes the file; returns the exit code. options: of `export`, with `words`, its arguments
    key=value. Raises UserError."""
    run = expand(options.run, "RUN")
    to = expand(options.to, "--to")
    check_target(to, options.force)
    if to.suffix == ".onnx":
        _check_packages()
    objects = _objects(options.words)
    words = [
        f"resume={run}",
        *options.words,
        *(f"{section}.name={one.name}" for section, one in objects.items()),
        *_PLAIN,
        "batch.per_rank=1",
        "comm.engine=single",
    ]
    if options.adapters == "separate":
        what = "--adapters separate writes a folder for PEFT, but --to names a file"
        raise UserError(what, "--adapters", "--to FOLDER; or --adapters merged")
    merge = options.adapters == "merged"
    try:
        return on_connected_ranks(
            lambda rank: _write(rank, run, to, options.checkpoint, merge),
            None,
            words,
            read_former_run=read_former_run,
            given=objects,
            what="export",
        )
    except RankFailed as failed:
        return failed.code


def _objects(words: Sequence[str]) -> dict[str, Given]:
    """Replaces sections of the run: an exported model needs neither its data nor its targets."""
    if any(word.startswith("task.name=") for word in words):
        return {"data": OF_A_FILE}
    return {"data": OF_A_FILE, "task": WITHOUT_TARGETS}


def _check_packages() -> None:
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        what = f"a .onnx file needs {', '.join(missing)}, which writes it or reads it back"
        fix = f"pip install {' '.join(missing)}; or --to model.pt2, which needs only torch"
        raise UserError(what, "--to", fix)


def _write(rank: ConnectedRank, run: Path, to: Path, which: str, merge: bool) -> int:
    config = rank.config
    if config.framework != "torch":
        what = f"the run has framework={config.framework}; a {to.suffix} file needs framework=torch"
        others = "--to model.safetensors" + " or model.keras" * (config.framework == "keras")
        raise UserError(what, "--to", others)
    _check_adapters(run, has_adapters=bool(config.model.lora), merge=merge)
    loaded = load_checkpoint(rank, which, inputs_alone)

    from hvdtrain.extras.export.graph.onnx_file import OnnxFile
    from hvdtrain.extras.export.graph.pt2_file import Pt2File
    from hvdtrain.extras.export.graph.traced import merge_adapters, trace

    learner: Any = loaded.learner
    if merge:
        merge_adapters(learner.model, config.model.lora_scale)
    traced = trace(learner.model, config, loaded.task)
    fields, notes = metadata(run, loaded.checkpoint)
    fields = {"hvdtrain": __version__, **fields, "signature": traced.signature}
    file = (OnnxFile if to.suffix == ".onnx" else Pt2File)(traced, fields)
    with _unfinished(to) as path:
        file.write(path)
        compared = traced.check(file.read_back(path), file.tolerance)
        size_bytes = path.stat().st_size
    step = loaded.checkpoint.train_state.progress.step
    averages = [AVERAGES_WRITTEN]
    sizes = f"{traced.parameters:,} parameters, {size_bytes / 1e6:,.1f} MB"
    lines = [
        *loaded.notes,
        *notes,
        *averages * (config.optim.averages and step > 0),
        f"step {step} of {run} -> {to}: {sizes}",
        f"read back: {compared}",
        *lines_of_fields(fields),
        f"takes    {traced.signature}, computed in {traced.number_type}",
        *file.how_to_load(to),
    ]
    print("\n".join(lines))
    return DONE


def _check_adapters(run: Path, *, has_adapters: bool, merge: bool) -> None:
    """Raises UserError as the export of weights does."""
    if merge and not has_adapters:
        fix = "leave --merged out: only a run with model.lora has adapters"
        raise UserError(f"{run} has no adapters", "--merged", fix)
    if has_adapters and not merge:
        what = f"{run} has adapters (model.lora), which a file of the computation has only merged"
        raise UserError(what, "command line of export", "--merged merges them into the weights")


@contextmanager
def _unfinished(to: Path) -> Iterator[Path]:
    """Inside, a path beside `to` with its ending, which becomes `to` if no error is raised. Raises
    UserError if it cannot be written."""
    try:
        with tempfile.TemporaryDirectory(dir=to.parent, prefix=f".{to.name}.unfinished-") as folder:
            path = Path(folder) / f"model{to.suffix}"
            yield path
            with path.open("rb") as file:
                os.fsync(file.fileno())
            os.replace(path, to)
    except OSError as error:
        raise UserError(
            f"cannot write {to}: {error.strerror or error}",
            "--to",
            "give a folder that can be written and has room",
        ) from None
