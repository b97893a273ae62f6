"""hvdtrain predict: writes a table of a run's model outputs for image files, tables, arrays and
tokens, on any number of ranks."""

from __future__ import annotations

import contextlib
import csv
import importlib
import io
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.config import plugins
from hvdtrain.config.schema import Config
from hvdtrain.config.sections.section import Given
from hvdtrain.core.extras import image_files, map_files, maps_module
from hvdtrain.core.folder import Folder
from hvdtrain.data.input_encoding import encoding_of_run
from hvdtrain.errors import DONE, UserError
from hvdtrain.extras.image_files.decode import SUFFIXES
from hvdtrain.extras.image_files.image_source import (
    FoundImages,
    ImageFiles,
    ImageSource,
    find_images,
    left_out_note,
)
from hvdtrain.extras.predict.data_file import open_stored, read_data_file, stored_name
from hvdtrain.extras.trained_models.arguments import (
    OF_A_FILE,
    OF_STORED_ARRAYS,
    Arguments,
    parse,
    read_former_run,
)
from hvdtrain.extras.trained_models.of_data import WITHOUT_TARGETS, AskedData, predict_data
from hvdtrain.extras.trained_models.saved_weights import load_model, run_folder
from hvdtrain.extras.trained_models.target import refuse_inputs
from hvdtrain.extras.trained_models.trained_model import TrainedModel
from hvdtrain.tasks.rows import Rows
from hvdtrain.tasks.transform import is_image
from hvdtrain.training.failure import RankFailed
from hvdtrain.training.predictions import predict as predict_samples
from hvdtrain.training.replicas.same_job import check_same_facts, facts
from hvdtrain.training.run_rank import ConnectedRank, on_connected_ranks

USAGE = """\
hvdtrain predict RUN --images DIR|--data FILE|package.module:function --to FILE.csv|FILE.nc [--checkpoint newest] [--force] [key=value ...]
  RUN            the run folder
  --images       the folder of image files, also in folders of its own; they are read as those of the training set were
  --data         numbers instead of images: a table .csv with the columns of x in their order (y, label, labels and target are left
                 out; of a run with data.columns also .parquet), .npy with rows of x or tokens, .npz and .safetensors with arrays by name;
                 .nc, .h5 and .zarr with the arrays of the run's data.fields; or your own function, as of data.name
  --to           the table to write: file or number of the sample, class, the model's probability of that class and of each class, up
                 to 100 (squared_error: its outputs); of tokens the next one; of regression and losses of your own what the model
                 gives; - for the screen; for maps FILE.nc or FILE.zarr, with the coordinates of --data; with --images and
                 task.name=segmentation a folder for a PNG of each image, whose pixels are classes (every rank writes its own)
  --checkpoint   newest, best (by the task's objective), or the name of one: step-00000120; default: newest, and of a run with
                 stop.restore_best best
  --force        overwrite FILE if it exists
  key=value      options of the function of --data; data.size=N to take the centre square of images of other sizes; evaluate.views,
                 batch.evaluate, speed.*, comm.*, shard.stage, optim.ema=null (as in evaluate)
Under mpirun each rank reads its share of the images, and has its parts of the weights where the run has shard.stage=3 (on
comm.engine=mpi or torchdist; shard.stage=0: the whole model)."""  # noqa: E501


def predict(arguments: Sequence[str]) -> int:
    """Runs `predict` on this rank; returns the exit code. Raises UserError only for a mistake in
    the command line."""
    if not arguments or {"-h", "--help"} & set(arguments):
        print(USAGE)
        return DONE
    parsed = parse(
        "predict",
        USAGE,
        arguments,
        {"--images": None, "--data": None, "--to": None, "--checkpoint": ""},
        ["--force"],
    )
    given = [name for name in ("images", "data") if parsed.options[name] is not None]
    if len(given) != 1 or parsed.options["to"] is None:
        if len(given) == 1:
            what = "--to is missing"
        elif not given:
            what = "--images or --data is missing"
        else:
            what = "--images and --data are both given"
        raise UserError(what, "command line of predict", USAGE.partition("\n")[0])
    to = parsed.options["to"]
    if parsed.options["force"] and to != "-":
        inputs = {f"--{name}": parsed.options[name] for name in given}
        refuse_inputs(to, parsed.run, parsed.overrides, inputs)
    if given == ["images"] and not Path(to).suffix and to != "-":
        maps_module("mask_files", "--to").check_folder_of_masks(to, parsed.options["force"])
    else:
        _check_target(to, parsed.options["force"], of_maps=given == ["data"] and _is_map_file(to))
    work, objects = (_predict, {}) if given == ["images"] else (_predict_data, _objects(parsed))
    words = [*parsed.of_job(), *(f"{section}.name={one.name}" for section, one in objects.items())]
    if given == ["data"] and "data" not in objects:
        words.append(f"data.name={parsed.options['data']}")
    try:
        return on_connected_ranks(
            lambda rank: work(rank, parsed),
            None,
            words,
            read_former_run=read_former_run,
            given=objects,
            what="prediction",
        )
    except RankFailed as failed:
        return failed.code


def _objects(parsed: Arguments) -> dict[str, Given]:
    """Replaces sections of the run: a prediction needs neither its data nor its targets."""
    data = parsed.options["data"]
    if ":" in data and not os.path.lexists(os.path.expanduser(data)):
        objects = {}
    else:
        objects = {"data": OF_A_FILE if stored_name(data) is None else OF_STORED_ARRAYS}
    if not any(word.startswith("task.name=") for word in parsed.overrides):
        objects["task"] = WITHOUT_TARGETS
    return objects


@contextlib.contextmanager
def _said_once(rank: ConnectedRank) -> Iterator[None]:
    """Drops what ranks other than 0 print on columns: each rank reads the whole file."""
    with (
        contextlib.redirect_stderr(io.StringIO())
        if rank.communicator.rank
        else (contextlib.nullcontext())
    ):
        yield


def _predict_data(rank: ConnectedRank, parsed: Arguments) -> int:
    config = rank.config
    name = parsed.options["data"]
    stored = None
    samples: Any
    if config.data.given is OF_STORED_ARRAYS:
        stored = open_stored(name, config)
        samples = stored
    elif config.data.given is OF_A_FILE:
        with _said_once(rank):
            samples = read_data_file(
                Path(os.path.expanduser(name)),
                config.data.options,
                encoding_of_run(run_folder(rank)),
            )
    else:
        samples = plugins.call_own(
            config.data, {"name": name, "root": config.data.root, "split": "val"}
        )
    to = parsed.options["to"]
    of_maps = _is_map_file(to)
    model, numbers = predict_data(
        rank,
        AskedData(samples, name, "--data"),
        parsed.options["checkpoint"],
        lambda outputs, model, lengths: (
            _map_writer(to).maps_of(outputs, model.task)
            if of_maps
            else _rows(model, config).numbers(outputs, lengths)
        ),
    )
    if rank.communicator.rank:
        return DONE
    print("\n".join(model.notes), end="\n" * bool(model.notes), file=sys.stderr)
    if of_maps:
        checkpoint = f"{parsed.run}, {model.checkpoint.folder.name}"
        _map_writer(to).write(to, numbers, model.task, stored, config, checkpoint)
        print(f"{len(numbers):,} samples -> {to}")
        return DONE
    form = _rows(model, config)
    rows = [[str(sample), *form.row(row)] for sample, row in enumerate(numbers)]
    _write(to, ["sample", *form.head(numbers.shape[1])], rows, "samples")
    return DONE


def _is_map_file(to: str) -> bool:
    return Path(to).suffix in map_files()


def _map_writer(to: str) -> Any:
    return importlib.import_module(map_files()[Path(to).suffix])


def _rows(model: TrainedModel, config: Config) -> Rows:
    """Converts outputs of the model to rows."""
    return model.task.rows(config.model.loss == "cross_entropy", config.data.class_names)


def _predict(rank: ConnectedRank, parsed: Arguments) -> int:
    config = rank.config
    communicator = rank.communicator
    folder = os.path.expanduser(parsed.options["images"])
    images, left_out = list_images(Path(folder))
    files = ImageFiles(folder, images)
    model = load_model(rank, parsed)
    task = model.task
    to = parsed.options["to"]
    is_of_images = task.transforms is None and "x" in task.fields and is_image(task.fields["x"])
    is_of_masks = is_of_images and task.mask_label is not None
    if not is_of_masks and not (is_of_images and task.class_label is not None):
        what = f"task.name={task.name}" + (
            f" with the inputs {', '.join(task.transforms.each)}" if task.transforms else ""
        )
        raise UserError(
            f"--images needs a run trained on images, but this run has {what}", "RUN", "--data FILE"
        )
    source = _source(files, task.sizes["shape"], task.sizes.get("classes", 1), config)
    if communicator.size > 1:
        data = {
            "image files": source.image_digest(config.seed),
            "samples": len(source),
            "names": "\n".join(files.paths),
        }
        check_same_facts(communicator, facts(config, data, communicator.name))
    if is_of_masks:
        write_masks = maps_module("mask_files", "--to").write_masks
        count = write_masks(
            rank,
            model.learner,
            task.fields["y"],
            source,
            files.paths,
            to,
            parsed.options["force"],
        )
        if not communicator.rank:
            notes = [*model.notes, *left_out_note(left_out, folder)]
            print("\n".join(notes), end="\n" * bool(notes), file=sys.stderr)
            print(f"{count:,} masks -> {to}")
        return DONE
    _check_target(to, parsed.options["force"])
    form = _rows(model, config)
    mine = [
        form.numbers(predictions.outputs, None)
        for _, predictions in predict_samples(
            config, model.learner, source, communicator, rank.heartbeat
        )
    ]
    columns = max(communicator.allgather_object(mine[0].shape[1] if mine else 0))
    # in the order of the files
    gathered = communicator.allgather(np.concatenate([np.empty((0, columns)), *mine]), "predict")
    if communicator.rank:
        return DONE
    rows = [
        [path, *form.row(row)] for path, row in zip(files.paths, gathered.tolist(), strict=True)
    ]
    notes = [*model.notes, *left_out_note(left_out, folder)]
    print("\n".join(notes), end="\n" * bool(notes), file=sys.stderr)
    _write(parsed.options["to"], ["file", *form.head(columns)], rows, "images")
    return DONE


def list_images(folder: Path) -> FoundImages:
    """Returns the image files that training would find, in the folder and its subfolders, sorted by
    path. Raises UserError if there are none."""
    if not os.path.lexists(folder):
        raise UserError(
            f"there is no folder {folder}", "--images", "--images DIR, a folder with image files"
        )
    try:
        files = find_images(str(folder))
    except OSError as error:
        what = f"cannot list the images: {error.strerror}"
        raise UserError(what, str(error.filename), "give a folder that can be read") from error
    if not files.images:
        raise UserError(
            f"no images ({' '.join(SUFFIXES)})", str(folder), "--images DIR, with image files in it"
        )
    return FoundImages(sorted(files.images), files.left_out)


def _source(
    files: ImageFiles, shape: tuple[int, int, int], classes: int, config: Config
) -> ImageSource:
    """Returns the images in the form that the model takes.

    Their centre squares are resized if data.size is set, or if the model's data set has no image
    files. Otherwise all must have the model's size.
    """
    sized = config.data.options.get("size") is not None
    crop = sized or (
        config.data.name not in ("image_masks", *image_files()) and shape[0] == shape[1]
    )
    return ImageSource(
        encoded=files,
        y=np.zeros(len(files), np.int64),
        classes=classes,
        shape=shape,
        crop=crop,
        first=lambda: "the model's training images",
        upright=config.data.options.get("exif") == "apply",
    )


def _check_target(to: str, force: bool, of_maps: bool = False) -> None:
    """Raises UserError if the table cannot be written; called before anything is read."""
    if to == "-":
        return
    path = Path(os.path.expanduser(to))
    if path.suffix != ".csv" and not of_maps:
        raise UserError(f"{to} does not end in .csv", "--to", "as in --to predictions.csv")
    if not os.path.isdir(path.parent):
        raise UserError(f"there is no folder {path.parent}", "--to", f"mkdir -p {path.parent}")
    if of_maps:
        _map_writer(to).check(to)
    if os.path.lexists(path) and not force:
        raise UserError(
            f"{to} exists already", "--to", "--force overwrites it; or give another name"
        )


def _write(to: str, head: Sequence[str], rows: Sequence[Sequence[str]], unit: str) -> None:
    """Writes the whole table, or raises UserError and leaves the file unchanged."""
    out = io.StringIO()
    table = csv.writer(out, lineterminator="\n")
    table.writerow(head)
    table.writerows(rows)
    if to == "-":
        print(out.getvalue(), end="", flush=True)
        return
    path = Path(os.path.expanduser(to))
    try:
        with Folder.open(path.parent) as folder:
            # a file name that is not valid UTF-8 keeps its bytes
            folder.replace(path.name, out.getvalue().encode("utf-8", "surrogateescape"))
    except OSError as error:
        raise UserError(
            f"cannot write {to}: {error.strerror or error}",
            "--to",
            "give a folder that can be written and has room",
        ) from None
    print(f"{len(rows):,} {unit} -> {to}")
