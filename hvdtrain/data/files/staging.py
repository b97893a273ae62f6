"""data.stage: the extra that copies the files of a data set to each node's local disk."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any, NamedTuple

from hvdtrain.core.extras import stages
from hvdtrain.data.files.selection import FileSelection, Staging
from hvdtrain.errors import UserError


class StagedData(NamedTuple):
    """The root and options with which a staged data set is built, instead of the user's."""

    root: Path | None
    options: dict[str, Any]


def stage_data(
    name: str,
    root: Path | None,
    options: dict[str, Any],
    folder: str,
    where: str,
    staging: Staging = Staging(),  # noqa: B008 (it does not change)
) -> StagedData:
    """Copies the files of data set `name` below `folder` by the extra that does so. Raises
    UserError, also without that extra; `where` is where data.stage was set."""
    module = stages()
    if module is None:
        raise UserError(
            "this copy of hvdtrain has no extra that copies data to the nodes",
            where,
            "leave data.stage out; `hvdtrain extras` lists the installed extras",
        )
    copied: StagedData = importlib.import_module(module).stage_data(
        name, root, options, folder, where, staging
    )
    return copied


def splits_of_images(name: str, source: Path, archives: bool = False) -> tuple[FileSelection, ...]:
    """Returns the splits of a user's images: train, and the first existing validation split.

    archives: in train/, or train-*.tar in the root.
    """
    existing = (
        split
        for split in ("val", "validation", "test")
        if (source / split).is_dir() or (archives and any(source.glob(f"{split}-*")))
    )
    splits = ("train", next(existing, "val"))
    folders = tuple(FileSelection(split, recursive=not archives) for split in splits)
    return folders + tuple(FileSelection("", f"{split}-*") for split in splits if archives)
