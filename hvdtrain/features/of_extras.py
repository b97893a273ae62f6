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
    excludes = {id(feature): list(feature.excludes) for feature in features}
    for extra in modules("features").values():
        for added in extra.FEATURES:
            place = _place(found, added)
            found[place:place] = added.features
            excludes |= {id(feature): list(feature.excludes) for feature in added.features}
        for added in extra.ROWS:
            for feature in added.features:
                _insert(excludes[id(feature)], added)
    return tuple(
        replace(
            feature,
            excludes=tuple(row for row in excludes[id(feature)] if row.key in known_keys()),
        )
        for feature in found
    )


def _place(features: Sequence[JobFeature], added: Added) -> int:
    if added.behind is not None:
        return features.index(added.behind) + 1
    assert added.before is not None, added
    return features.index(added.before)


def _insert(rows: list[Exclusion], added: AddedRows) -> None:
    places = [place for place, row in enumerate(rows, 1) if row.key == added.behind]
    place = 0 if not added.behind else places[-1] if places else len(rows)
    rows[place:place] = added.rows
