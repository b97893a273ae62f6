"""`predict --data FILE`: numbers of a table, arrays by name, or the inputs of a run in a file of
arrays with coordinates."""

from __future__ import annotations

import importlib
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from hvdtrain.config import plugins
from hvdtrain.config.schema import Config
from hvdtrain.core.extras import data_files, number_files
from hvdtrain.data.configured.gaps import with_gaps
from hvdtrain.data.input_encoding import InputEncoding
from hvdtrain.data.option_error import OptionError
from hvdtrain.data.source import Source
from hvdtrain.data.user_data.arrays import read_safetensors
from hvdtrain.errors import UserError, first_line, short

NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})  # a run that was not trained on files


def read_data_file(
    path: Path, options: Mapping[str, Any] = NO_OPTIONS, encoding: InputEncoding | None = None
) -> Any:
    """An array of a table or of a .npy file, arrays by name of the others. Nothing pickled is read.
    Raises UserError.

    options: of the run's data set. encoding: what the columns of the run's table become; None if
    they are numbers.
    """
    readers = number_files()
    suffixes = sorted((".npy", ".safetensors", *readers))
    encoded = () if encoding is None else encoding.suffixes
    if path.suffix not in (*suffixes, *encoded):
        ends = ", ".join((*suffixes, *data_files()))
        fix = f"a file that ends in {ends}; or your own package.module:function, or --images DIR"
        raise UserError(f"{short(str(path))} is not a file of numbers", "--data", fix)
    if not path.is_file():
        raise UserError(
            f"there is no file {path}", "--data", "the path of a file, or package.module:function"
        )
    if encoding is not None and path.suffix in encoded:
        return encoding.read(path, options)
    if path.suffix in readers:
        return importlib.import_module(readers[path.suffix]).read_numbers(path, options)
    if path.suffix == ".safetensors":
        return read_safetensors(path, str(path), "--data")
    try:
        with np.errstate(over="ignore"):
            # memory-mapped, so a damaged header does not allocate memory
            return np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise UserError(
            f"{path} cannot be read: {first_line(error)}",
            "--data",
            "a file that numpy.save or numpy.savez wrote",
        ) from None


def stored_name(path: str) -> str | None:
    """Returns the data.name that reads such a file one block at a time; None for other files."""
    return data_files().get(Path(path).suffix)


def open_stored(path: str, config: Config) -> Source:
    """Opens the inputs in a file of arrays, with the run's data.fields, data.dtypes and data.gaps.
    Raises UserError."""
    name = stored_name(path)
    assert name is not None, path
    fields = inputs_of(config.data.options)
    wanted = config.data.options.get("fields")  # by default x and y
    dtypes = config.data.options.get("dtypes") or {}
    plugin = plugins.load("data/datasets", name, "--data")
    file = Path(os.path.expanduser(path))
    kept = {field: dtype for field, dtype in dtypes.items() if field in fields}
    try:
        source: Source = plugin.build(name, file, "train", fields=fields, dtypes=kept)
        is_shifted = config.data.shift is not None and "y" not in (wanted or {"y": "y"})
        gaps = ["x" if field == "y" and is_shifted else field for field in config.data.gaps]
        return with_gaps(source, {field for field in gaps if field in source.fields})
    except OptionError as error:
        raise UserError(error.what, "--data", error.fix) from None


def inputs_of(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns data.fields without the target; x of the file by default."""
    fields = options.get("fields") or {}
    return {field: texts for field, texts in fields.items() if field != "y"} or {"x": "x"}
