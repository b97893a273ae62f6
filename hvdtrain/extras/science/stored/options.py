"""The options that all data sets of stored arrays have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hvdtrain.data.option_error import OptionError
from hvdtrain.extras.science.columns.options import ColumnOptions


@dataclass(frozen=True)
class Wanted:
    """The options that all these data sets have."""

    fields: Mapping[str, str | list[str]] | None
    dtypes: Mapping[str, str] = field(default_factory=dict)
    split_by: str | None = None
    split_val: Sequence[bool | int | str] | None = None
    cache_mb: int = 256
    columns: ColumnOptions | None = None  # None: the columns of a table have only numbers


def check_options(wanted: Wanted) -> None:
    if wanted.cache_mb < 1:
        raise OptionError(
            f"data.cache_mb={wanted.cache_mb} is not a size", "cache_mb", "megabytes, such as 256"
        )
    if wanted.split_val is not None and wanted.split_by is None:
        raise OptionError(
            "data.split_val lists values of a column, but data.split_by does not name one",
            "split_val",
            "data.split_by=COLUMN",
        )
    for name, dtype in (wanted.dtypes or {}).items():
        if dtype not in (
            "float16",
            "float32",
            "float64",
            "int8",
            "uint8",
            "int16",
            "uint16",
            "int32",
            "uint32",
            "int64",
            "bool",
        ):
            raise OptionError(
                f"data.dtypes has {name} as {dtype!r:.40}",
                "dtypes",
                "float32, float64, int64, uint8, ...",
            )
        if wanted.fields is not None and name not in wanted.fields:
            raise OptionError(
                f"data.dtypes has the field {name}, but data.fields does not",
                "dtypes",
                f"{', '.join(wanted.fields)}",
            )
