"""The features of extras, and rows with which hvdtrain's features exclude them: FEATURES and ROWS
in every extras/NAME/features.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from hvdtrain.config.exclusion import Exclusion
from hvdtrain.config.schema import known_keys
from hvdtrain.core.extras import modules
from hvdtrain.features.job_feature import JobFeature


class Added(NamedTuple):
    """Features that an extra adds, next to a feature of hvdtrain, which sets the order of
    conflicts."""

    features: tuple[JobFeature, ...]
    behind: JobFeature | None = None
    before: JobFeature | None = None  # used without `behind`


class AddedRows(NamedTuple):
    """Rows about an extra that features of hvdtrain get."""

    features: tuple[JobFeature, ...]
    rows: tuple[Exclusion, ...]
    behind: str = ""  # the key of the row after which they are inserted; empty: they come first


def with_features_of_extras(features: Sequence[JobFeature]) -> tuple[JobFeature, ...]:
    """Returns the features of hvdtrain and of extras, in the order in which conflicts are checked.

    Skips rows for keys that this copy does not have because an extra is not installed.
    """
    found = list(features)
    rows: list[AddedRows] = []
    for extra in modules("features").values():
        rows += extra.ROWS
        for added in extra.FEATURES:
            place = _place(found, added)
            found[place:place] = added.features
    return tuple(replace(feature, excludes=_excludes(feature, rows)) for feature in found)


def _place(features: Sequence[JobFeature], added: Added) -> int:
    if added.behind is not None:
        return features.index(added.behind) + 1
    assert added.before is not None, added
    return features.index(added.before)


def _excludes(feature: JobFeature, added: Sequence[AddedRows]) -> tuple[Exclusion, ...]:
    """Returns the rows of a feature with those that extras add; rows that others follow come
    first."""
    rows = list(feature.excludes)
    left = [each for each in added if feature in each.features]
    while left:
        each = next((each for each in left if not _follows(each, left)), left[0])
        left.remove(each)
        places = [place for place, row in enumerate(rows, 1) if row.key == each.behind]
        place = 0 if not each.behind else places[-1] if places else len(rows)
        rows[place:place] = each.rows
    return tuple(row for row in rows if row.key in known_keys())


def _follows(one: AddedRows, left: Sequence[AddedRows]) -> bool:
    """Whether others add the row that it follows."""
    return any(row.key == one.behind for each in left if each is not one for row in each.rows)
