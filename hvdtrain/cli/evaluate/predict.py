"""hvdtrain predict: what the model of a run says about image files, as a table, on any number of ranks."""

from __future__ import annotations

import csv
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from hvdtrain.cli.evaluate.arguments import Arguments, parse, read_former_run
from hvdtrain.cli.evaluate.command import load_model
from hvdtrain.cli.evaluate.results import name_of
from hvdtrain.config.schema import Config
from hvdtrain.core.folder import Folder
from hvdtrain.data.images.decode import SUFFIXES
from hvdtrain.data.images.find_files import FoundImages, find_images, left_out_note
from hvdtrain.data.images.image_files import ImageFiles
from hvdtrain.data.images.image_source import ImageSource
from hvdtrain.errors import DONE, UserError
from hvdtrain.tasks.classification.build import Classification
from hvdtrain.training.evaluation.evaluate import predict as predict_samples
from hvdtrain.training.failure import RankFailed
from hvdtrain.training.replicas.same_job import check_same_facts, facts
from hvdtrain.training.run_rank import Rank, on_connected_ranks

USAGE = """\
hvdtrain predict RUN --images DIR --to FILE.csv [--checkpoint newest] [--force] [key=value ...]
  RUN            the run folder
  --images       the folder of image files, also in folders of its own; they are read as those of the training set were
  --to           the table to write: file, class, and the model's probability of that class (squared_error: its output); - for the screen
  --checkpoint   newest, best (by the task's objective), or the name of one: step-00000120; default: newest, and of a run with
                 stop.restore_best best
  --force        overwrite FILE if it exists
  key=value      data.size=N to take the centre square of images of other sizes; evaluate.views, batch.evaluate, speed.*,
                 comm.*, shard.stage, optim.ema=null (as in evaluate)
Under mpirun each rank reads its share of the images, and has its parts of the weights where the run has shard.stage=3 (on
comm.engine=mpi or torchdist; shard.stage=0: the whole model)."""
_HEADER = ("file", "class", "probability")


def predict(arguments: Sequence[str]) -> int:
    """Runs `predict` on this rank; returns the exit code. Raises UserError for a mistake in the command line alone."""
    if not arguments or {"-h", "--help"} & set(arguments):
        print(USAGE)
        return DONE
    parsed = parse("predict", USAGE, arguments, {"--images": None, "--to": None, "--checkpoint": ""}, ["--force"])
    for name in ("images", "to"):
        if parsed.options[name] is None:
            raise UserError(f"--{name} is missing", "command line of predict", USAGE.partition("\n")[0])
    _check_target(parsed.options["to"], parsed.options["force"])
    try:
        return on_connected_ranks(
            lambda rank: _predict(rank, parsed), None, parsed.of_job(), read_former_run=read_former_run, what="prediction"
        )
    except RankFailed as failed:
        return failed.code


def _predict(rank: Rank, parsed: Arguments) -> int:
    config, communicator = rank.config, rank.communicator
    folder = os.path.expanduser(parsed.options["images"])
    images, left_out = list_images(Path(folder))
    files = ImageFiles(folder, images)
    model = load_model(rank, parsed)
    if not isinstance(model.task, Classification) or not model.task.is_of_images:
        raise UserError(f"predict names the classes of images, and the run has task.name={model.task.name}", "RUN", "evaluate RUN")
    source = _source(files, model.task, config)
    if communicator.size > 1:
        data = {"image files": source.image_digest(config.seed), "samples": len(source), "names": "\n".join(files.paths)}
        check_same_facts(communicator, facts(config, data, communicator.name))
    mine = [np.empty((0, 2))]
    for _, predictions in predict_samples(config, model.learner, source, communicator, rank.heartbeat):
        mine.append(_best(predictions.outputs.astype(np.float64), is_softmax=config.model.loss == "cross_entropy"))
    best = communicator.allgather(np.concatenate(mine), "predict.best")  # (n, 2), in the order of the files
    if communicator.rank:
        return DONE
    rows = [
        (path, name_of(int(label), config.data.class_names), f"{probability:.6f}")
        for path, (label, probability) in zip(files.paths, best.tolist(), strict=True)
    ]
    notes = [*model.notes, *left_out_note(left_out, folder)]
    print("\n".join(notes), end="\n" * bool(notes), file=sys.stderr)
    _write(parsed.options["to"], rows)
    return DONE


def list_images(folder: Path) -> FoundImages:
    """The image files that training would find in the folder and those in it, sorted by path. Raises UserError without any."""
    if not os.path.lexists(folder):
        raise UserError(f"there is no folder {folder}", "--images", "--images DIR, a folder with image files")
    try:
        found = find_images(str(folder))
    except OSError as error:
        what = f"cannot list the images: {error.strerror}"
        raise UserError(what, str(error.filename), "give a folder that can be read") from error
    if not found.images:
        raise UserError(f"no images ({' '.join(SUFFIXES)})", str(folder), "--images DIR, with image files in it")
    return FoundImages(sorted(found.images), found.left_out)


def _source(files: ImageFiles, task: Classification, config: Config) -> ImageSource:
    """The images in the form that the model takes.

    Their centre squares are resized where data.size is set, and where the model is of a data set that has no image files; else all
    have the model's size.
    """
    sized = config.data.options.get("size") is not None
    crop = sized or (config.data.name not in ("folder", "webdataset") and task.shape[0] == task.shape[1])
    return ImageSource(
        encoded=files,
        y=np.zeros(len(files), np.int64),
        classes=task.classes,
        shape=(task.shape[0], task.shape[1], task.shape[2]),
        crop=crop,
        first=lambda: "the model's training images",
        upright=config.data.options.get("exif") == "apply",
    )


def _best(logits: np.ndarray, is_softmax: bool) -> np.ndarray:
    """float64 (n, 2): the class with the largest logit, and its probability; without softmax that logit."""
    label = logits.argmax(1)
    best = logits[np.arange(len(logits)), label]
    if is_softmax:
        best = 1 / np.exp(logits - best[:, None]).sum(1)
    return np.stack([label.astype(np.float64), best], 1)


def _check_target(to: str, force: bool) -> None:
    """Raises UserError where the table cannot be written; called before anything is read."""
    if to == "-":
        return
    path = Path(os.path.expanduser(to))
    if path.suffix != ".csv":
        raise UserError(f"{to} does not end in .csv", "--to", "as in --to predictions.csv")
    if not os.path.isdir(path.parent):
        raise UserError(f"there is no folder {path.parent}", "--to", f"mkdir -p {path.parent}")
    if os.path.lexists(path) and not force:
        raise UserError(f"{to} exists already", "--to", "--force overwrites it; or give another name")


def _write(to: str, rows: Sequence[tuple[str, str, str]]) -> None:
    """Writes the whole table, or leaves the file as it was and raises UserError."""
    out = io.StringIO()
    table = csv.writer(out, lineterminator="\n")
    table.writerow(_HEADER)
    table.writerows(rows)
    if to == "-":
        print(out.getvalue(), end="", flush=True)
        return
    path = Path(os.path.expanduser(to))
    try:
        with Folder.open(path.parent) as folder:
            folder.replace(path.name, out.getvalue().encode("utf-8", "surrogateescape"))  # a name that is no text keeps its bytes
    except OSError as error:
        raise UserError(f"cannot write {to}: {error.strerror or error}", "--to", "give a folder that can be written and has room") from None
    print(f"{len(rows):,} images -> {to}")
