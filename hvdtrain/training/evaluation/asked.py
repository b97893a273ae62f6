"""What a run's model is asked about: data of a script or a command, in the form of the samples that it was trained on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hvdtrain.data.own.arrays import TARGETS, as_images, is_array
from hvdtrain.data.own.as_source import as_source
from hvdtrain.data.source import Field, Source, arrays_in_memory, check_numbers, reads_from_memory, reads_in_process
from hvdtrain.errors import UserError
from hvdtrain.tasks.columns import is_image

if TYPE_CHECKING:
    from hvdtrain.core.arrays import Batch


@dataclass(frozen=True, eq=False)
class AskedSource:
    """Samples of another source with the fields of a task, in its number types.

    Raises UserError where a field is missing or of another shape, and for a label outside of the classes.
    """

    source: Source
    fields: Mapping[str, Field]
    where: str

    def __post_init__(self) -> None:
        for name, field in self.fields.items():
            found = self.source.fields.get(name)
            if found is None or not _fits(found, field):
                what = f"the model takes {name} {field}, the data have {f'it as {found}' if found else ', '.join(self.source.fields)}"
                raise UserError(what, self.where, "data with the fields of the run")
        arrays = arrays_in_memory(self.source)
        for name, field in self.fields.items():
            if arrays is not None and field.values and name in arrays:
                check_numbers(name, arrays[name], field, self.where)

    def __len__(self) -> int:
        return len(self.source)

    def read(self, indices: np.ndarray) -> Batch:
        batch = self.source.read(indices)
        for name, field in self.fields.items():
            if field.values:
                check_numbers(name, batch[name], field, self.where, indices)
        return {name: _in_form(batch[name], field) for name, field in self.fields.items()}

    def digests(self, seed: int) -> dict[str, str]:
        return self.source.digests(seed)

    def identity(self) -> dict[str, str]:
        return self.source.identity()

    @property
    def reads_from_memory(self) -> bool:
        return reads_from_memory(self.source)

    @property
    def reads_in_process(self) -> bool:
        return reads_in_process(self.source)


def asked_source(given: Any, fields: Mapping[str, Field], name: str, where: str, workers: int | None = None) -> AskedSource:
    """What train_data of hvdtrain.train() may be, with these fields; of x or tokens alone also the array, and windows without the last one.

    Raises UserError where that is nothing that as_source() knows, or does not fit the fields.
    """
    only = next(iter(fields)) if len(fields) == 1 else None
    if only is not None and is_array(given):
        columns = [column for column in getattr(given, "columns", ()) if str(column) not in TARGETS]
        given = {only: given[columns].to_numpy() if columns else given}
    elif only is not None and isinstance(given, Mapping):
        given = {field: given[field] for field in given if field == only} or given
    if isinstance(given, Mapping) and only == "tokens" and is_array(given.get(only)):
        given = {only: _whole_windows(given[only], fields[only].shape[0])}
    return AskedSource(as_source(given, name, where, workers), fields, where)


def _whole_windows(tokens: Any, length: int) -> np.ndarray:
    """Windows that may lack their last token, which is predicted and not read."""
    array = np.asarray(tokens)
    return np.pad(array, ((0, 0), (0, 1))) if array.ndim == 2 and array.shape[1] == length - 1 else array


def _fits(found: Field, field: Field) -> bool:
    """Whether samples can be brought into the form of a field: whole numbers to floats, never back."""
    kinds = np.dtype(found.dtype).kind, np.dtype(field.dtype).kind
    if kinds[0] == "f" and kinds[1] != "f":
        return False
    if is_image(field):
        images = as_images(np.zeros((1, *found.shape), found.dtype))
        return images is not None and images.shape[1:] == field.shape
    return found.shape == field.shape or (field.shape == () and found.shape == (1,))


def _in_form(array: np.ndarray, field: Field) -> np.ndarray:
    images = as_images(array) if is_image(field) else None
    array = array if images is None else images
    return np.ascontiguousarray(array.reshape(len(array), *field.shape), field.dtype)
