"""Samples of a Dataset as arrays of fixed dtypes and shapes. Each is read with its own random
state, so every process reads the same bits."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from hvdtrain.core.arrays import Batch
from hvdtrain.core.own_line import own_line
from hvdtrain.core.progress import fold
from hvdtrain.data.field import TARGETS, Field, Padding, check_numbers, padded_by
from hvdtrain.data.ragged import check_padding
from hvdtrain.data.user_data.arrays import flat_fields, has_channels_first, is_array, to_numpy
from hvdtrain.errors import UserError, first_line, short

# two streams of counters
_TRAINING = 0x747261
_EVALUATION = 0x6576616C


_NOTHING: Mapping[str, Padding] = MappingProxyType({})
_INPUTS = ("x", "image", "img", "pixel_values")  # the first of these keys in a sample's dict is x


@dataclass(frozen=True)
class CollatedDataset:
    """A Dataset with its collate function and the fields of its samples. A worker process gets a
    copy."""

    dataset: Any
    collate: Callable[[list[Any]], Any] | None
    samples: int
    fields: Mapping[str, Field]
    name: str  # for messages
    kept: tuple[str, ...] = ()  # names of fields that are not renamed to x and y
    nested_inputs: tuple[str, ...] = ()  # fields that are nested in x
    # padding of fields whose rows are padded to shape[0]
    padding: Mapping[str, Padding] = dataclasses.field(default_factory=dict)

    def read(self, indices: np.ndarray, seeds: np.ndarray | None) -> Batch:
        """Reads samples into new arrays. The random generators of this process are left in the
        state after the last sample."""
        arrays = {
            name: np.empty((len(indices), *field.shape), field.dtype)
            for name, field in self.fields.items()
        }
        self.read_into(arrays, indices, seeds)
        return arrays

    def read_into(
        self, arrays: Mapping[str, np.ndarray], indices: np.ndarray, seeds: np.ndarray | None
    ) -> None:
        """Reads samples like read(), into the first rows of existing arrays; without seeds, as for
        evaluation.

        Raises UserError if user code fails, or if a sample does not match the first one.
        """
        found = len(self.dataset)
        if found != self.samples:
            what = (
                f"{self.name} has {found:,} samples now, and had {self.samples:,} when the job "
                "started"
            )
            raise UserError(
                what,
                defined_at(type(self.dataset).__len__),
                "a data set must not change while a job reads it",
            )
        seeds = evaluation_seeds(indices) if seeds is None else seeds
        for row, (index, seed) in enumerate(zip(indices.tolist(), seeds.tolist(), strict=True)):
            sample = self.sample(index, seed)
            self._check(index, sample)
            for name, array in sample.items():
                if name in self.padding:
                    arrays[name][row, : len(array)] = array
                    arrays[name][row, len(array) :] = self.padding[name].value
                    arrays[lengths_of(name)][row] = len(array)
                else:
                    arrays[name][row] = array

    def sample(self, index: int, seed: int) -> dict[str, np.ndarray]:
        """Reads one sample with this random state."""
        return self.sample_and_inputs(index, seed)[0]

    def sample_and_inputs(
        self, index: int, seed: int
    ) -> tuple[dict[str, np.ndarray], tuple[str, ...]]:
        """Reads one sample; also returns the names of fields nested in x."""
        set_random_state(seed)
        what = f"sample {index} of {self.name}"
        try:
            item = self.dataset[index]
            if self.collate is None:
                return _fields_of(item, what, self._where(), self.kept)
            collated = self.collate([item])
        except (UserError, MemoryError):
            raise
        except Exception as error:
            fix = "correct it there, or leave the sample out of the data set"
            raise UserError(
                f"{what}: {type(error).__name__}: {first_line(error)}", own_line(error), fix
            ) from error
        batch, inputs = _fields_of(collated, what, self._where(), self.kept)
        return self._first_rows(batch, what), inputs

    def _first_rows(self, batch: dict[str, np.ndarray], what: str) -> dict[str, np.ndarray]:
        wrong = next((name for name, array in batch.items() if array.shape[:1] != (1,)), None)
        if wrong is not None:
            shown = (
                f"{what}: the collate function gives {wrong} as {batch[wrong].dtype} "
                f"{batch[wrong].shape} of a list of one sample"
            )
            raise UserError(
                shown,
                self._where(),
                f"{wrong} of shape (1, ...): one row for each sample of the list",
            )
        return {name: array[0] for name, array in batch.items()}

    def _check(self, index: int, sample: Mapping[str, np.ndarray]) -> None:
        what = f"sample {index} of {self.name}"
        fields = {name: field for name, field in self.fields.items() if name.isidentifier()}
        if sample.keys() != fields.keys():
            raise UserError(
                f"{what} has {_names(sample)}, but the first one has {_names(fields)}",
                self._where(),
                "the same names in all samples",
            )
        for name, field in fields.items():
            array = sample[name]
            if (
                name in self.padding
                and array.dtype == field.dtype
                and array.shape[1:] == field.shape[1:]
            ):
                self._check_length(what, name, array)
            elif array.dtype != field.dtype or array.shape != field.shape:
                shown = (
                    f"{what} has {name} as {array.dtype} {array.shape}, but the first one as "
                    f"{field.dtype} {field.shape}"
                )
                fix = "the same type and shape in all samples: convert, resize, cut or pad them"
                is_longer = (
                    array.dtype == field.dtype and array.ndim and array.shape[1:] == field.shape[1:]
                )
                fix += f"; or {padded_by(name)}, which pads each micro-batch" if is_longer else ""
                raise UserError(shown, self._where(), fix)
            if array.dtype == np.uint64:
                check_numbers(name, array[None], field, self._where(), np.array([index]))
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                shown = (
                    f"{what} has {array[~np.isfinite(array)].flat[0]} in {name}, expected finite "
                    "numbers"
                )
                raise UserError(
                    shown, self._where(), "replace it, or leave the sample out of the data set"
                )

    def _check_length(self, what: str, name: str, array: np.ndarray) -> None:
        longest = self.fields[name].shape[0]
        if len(array) > longest:
            shown = (
                f"{what} has {len(array)} rows of {name}, but the longest sample had {longest} "
                "when the job started"
            )
            raise UserError(
                shown,
                self._where(),
                "cut it; or an attribute `lengths` of the Dataset, with the maximum length of "
                "each sample",
            )

    @property
    def where(self) -> str:
        """The name of the data, and the file and line that return a sample."""
        return f"{self.name}: {self._where()}"

    @property
    def defined_at(self) -> str:
        return defined_at(type(self.dataset))

    def _where(self) -> str:
        return defined_at(self.collate or type(self.dataset).__getitem__)


def lengths_of(name: str) -> str:
    """Returns the name of the array with the lengths of a padded field; no field can have this
    name."""
    return f"{name}.length"


def probed(
    dataset: Any,
    collate: Any,
    values: Mapping[str, int],
    name: str,
    seed: int,
    where: str,
    kept: tuple[str, ...] = (),
    padding: Mapping[str, Padding] = _NOTHING,
) -> CollatedDataset:
    """Reads the first sample of a Dataset to determine the fields. values: Field.values of
    integers.

    padding: of variable-length fields; the length of the first sample is used as their longest.
    Raises UserError if there is no sample, or if it cannot be read.
    """
    try:
        samples = len(dataset)
    except Exception as error:
        raise UserError(
            f"len() of {name}: {type(error).__name__}: {first_line(error)}",
            own_line(error),
            "correct it there",
        ) from error
    if not samples:
        raise UserError(f"{name} has no samples", where, "a Dataset with one sample or more")
    bare = CollatedDataset(dataset, collate, samples, {}, name, kept)
    first, inputs = bare.sample_and_inputs(0, seed)
    fields = {
        field: Field(
            str(array.dtype), array.shape, values.get(field, 0) if array.dtype.kind in "iu" else 0
        )
        for field, array in first.items()
    }
    check_padding(padding, {field: kind.dtype for field, kind in fields.items()}, where)
    for field in padding:
        if not fields[field].shape:
            raise UserError(
                f"data.pad has {field}, but {field} of {name} is a single number",
                where,
                "fields with one or more rows for each sample",
            )
        fields[lengths_of(field)] = Field("int64", ())
    return dataclasses.replace(bare, fields=fields, nested_inputs=inputs, padding=dict(padding))


def read_lengths(samples: CollatedDataset) -> dict[str, np.ndarray]:
    """Returns the lengths int64 (n,) of each padded field, from the attribute `lengths` of the
    Dataset, else from every sample.

    Raises UserError if the attribute is invalid, or a sample cannot be read.
    """
    told = getattr(samples.dataset, "lengths", None)
    if told is None or callable(told):
        seeds = evaluation_seeds(np.arange(samples.samples))
        rows: dict[str, list[int]] = {name: [] for name in samples.padding}
        for index, seed in enumerate(seeds.tolist()):
            sample = samples.sample(index, seed)
            for name, counts in rows.items():
                counts.append(len(sample[name]) if name in sample and sample[name].ndim else 0)
        return {name: np.array(counts, np.int64) for name, counts in rows.items()}
    by_name = told if isinstance(told, Mapping) else dict.fromkeys(samples.padding, told)
    found = {name: np.asarray(by_name.get(name, ())) for name in samples.padding}
    for name, array in found.items():
        if array.shape != (samples.samples,) or array.dtype.kind not in "iu" or array.min() < 0:
            what = (
                f"`lengths` of {samples.name} has {array.dtype} {array.shape} for {name}, but "
                f"there are {samples.samples} samples"
            )
            raise UserError(
                what, samples.defined_at, "whole numbers, 0 or more, one for each sample"
            )
    return {name: array.astype(np.int64) for name, array in found.items()}


def with_longest(samples: CollatedDataset, longest: Mapping[str, int]) -> CollatedDataset:
    """Returns the samples with these maximum lengths of padded fields."""
    fields = {
        name: kind._replace(shape=(longest[name], *kind.shape[1:]))
        for name, kind in samples.fields.items()
        if name in longest
    }
    return dataclasses.replace(samples, fields={**samples.fields, **fields})


def _fields_of(
    item: Any, what: str, where: str, kept: tuple[str, ...]
) -> tuple[dict[str, np.ndarray], tuple[str, ...]]:
    """Returns {name: array} for a dict, a pair (x, y) or a single x, where x may be a dict; also
    returns the names nested in x."""
    names: Mapping[Any, Any]
    if isinstance(item, Mapping):
        names = {key if key in kept else _name(key, item): value for key, value in item.items()}
    elif hasattr(item, "_fields"):
        names = item._asdict()
    elif isinstance(item, (tuple, list)) and not _is_numbers(item):
        if len(item) not in (1, 2):
            raise UserError(
                f"{what} is a {type(item).__name__} of {len(item)}, without names",
                where,
                'x, y; or a dict: {"x": ..., "y": ...}',
            )
        names = dict(zip(("x", "y"), item, strict=False))
    else:
        names = {"x": item}
    names, inputs = flat_fields(names, what, where)
    wrong = next(
        (name for name in names if not isinstance(name, str) or not name.isidentifier()), None
    )
    if not names or wrong is not None:
        raise UserError(
            f"{what} has a field named {wrong!r}", where, "names of fields are words: x, y, tokens"
        )
    return {name: _array(name, value, what, where) for name, value in names.items()}, inputs


def _name(key: Any, item: Mapping[Any, Any]) -> Any:
    """Renames the usual names of images and labels to x and y."""
    for name, others in (("x", _INPUTS), ("y", TARGETS)):
        if key == next((other for other in others if other in item), None):
            return name
    return key


def _is_numbers(item: Any) -> bool:
    """Whether a list contains plain numbers, so that it is one array."""
    return (
        isinstance(item, list)
        and len(item) > 0
        and all(isinstance(value, (int, float)) for value in item)
    )


def _array(name: str, value: Any, what: str, where: str) -> np.ndarray:
    shown = f"{name} of {what}"
    if hasattr(value, "getbands") and hasattr(value, "convert"):  # a PIL image
        value = np.asarray(
            value if value.mode in ("L", "RGB", "I;16", "I", "F") else value.convert("RGB")
        )
    if isinstance(value, (bool, int, np.integer)):
        return _int64(value, shown, where)
    if isinstance(value, (list, tuple)):
        try:
            value = np.array(
                [to_numpy(one, shown, where) if is_array(one) else one for one in value]
            )
        except ValueError:
            raise UserError(
                f"{shown} is a {type(value).__name__} of unequal parts", where, "one array"
            ) from None
    if not isinstance(value, (float, np.generic)) and not is_array(value):
        raise UserError(
            f"{shown} is a {type(value).__name__}: {short(value, 60)}",
            where,
            "an array, a tensor, an image or a number",
        )
    array = to_numpy(value, shown, where)
    if name == "y" and array.ndim == 0 and array.dtype.kind in "iu":
        return _int64(array.item(), shown, where)
    if name == "x" and array.dtype == np.uint8 and array.ndim == 2:
        return array[..., None]
    if name != "y" and array.dtype == np.uint8 and has_channels_first(array.shape):
        return array.transpose(1, 2, 0)
    return array


def _int64(value: int | np.integer[Any], shown: str, where: str) -> np.ndarray:
    if not -(2**63) <= int(value) < 2**63:
        raise UserError(
            f"{shown} is {int(value)}, expected an integer of 64 bits with a sign",
            where,
            "convert it to a float, or subtract a number",
        )
    return np.array(value, np.int64)


def defined_at(function: Any) -> str:
    """Returns the file:line where a function is defined, or its name if it has no file."""
    try:
        return (
            f"{inspect.getsourcefile(function)}:{inspect.getsourcelines(function)[1]}, "
            f"{function.__qualname__}"
        )
    except (TypeError, OSError, AttributeError):
        return str(getattr(function, "__qualname__", type(function).__qualname__))


def _names(fields: Mapping[str, Any]) -> str:
    return ", ".join(sorted(fields))


def training_seeds(indices: np.ndarray, epochs: np.ndarray, seed: int) -> np.ndarray:
    """Returns the seeds of the samples at `indices` in their epochs, uint64 (n,); they do not
    depend on the process that reads."""
    return np.asarray(
        fold(fold(_TRAINING, seed), epochs.astype(np.uint64), indices.astype(np.uint64)), np.uint64
    )


def evaluation_seeds(indices: np.ndarray) -> np.ndarray:
    """Returns the seeds of samples in evaluations; they do not depend on the job's seed."""
    return np.asarray(fold(_EVALUATION, indices.astype(np.uint64)), np.uint64)


def set_random_state(seed: int) -> None:
    """Seeds the random generators of Python, numpy and, if it is imported, torch (not those of
    devices); takes 20 us."""
    random.seed(seed)
    np.random.seed([seed & 0xFFFFFFFF, seed >> 32])
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.manual_seed(seed)


@contextlib.contextmanager
def random_state_kept() -> Iterator[None]:
    """Restores the random state on exit. Within the context, torch uses one thread, as in a worker
    process."""
    torch = sys.modules.get("torch")
    states = random.getstate(), np.random.get_state()
    of_torch = (torch.default_generator.get_state(), torch.get_num_threads()) if torch else None
    if torch and of_torch and of_torch[1] != 1:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        if torch and of_torch:
            torch.default_generator.set_state(of_torch[0])
            if of_torch[1] != 1:
                torch.set_num_threads(of_torch[1])
