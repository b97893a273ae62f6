"""The features of extras, and what features exclude of them: FEATURES and ROWS of every
extras/NAME/features.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from hvdtrain.config.exclusion import Exclusion
from hvdtrain.config.schema import known_keys
from hvdtrain.core.extras import modules
from hvdtrain.features.job_feature import JobFeature


class Added(NamedTuple):
    """Features of an extra."""

    features: tuple[JobFeature, ...]
    behind: JobFeature  # of hvdtrain: conflicts come in this order


class AddedRows(NamedTuple):
    """What features of hvdtrain exclude of an extra."""

    features: tuple[JobFeature, ...]
    rows: tuple[Exclusion, ...]
    behind: str = ""  # the key of another row that they come behind; empty: they come first


def with_features_of_extras(features: Sequence[JobFeature]) -> tuple[JobFeature, ...]:
    """The features of hvdtrain and those of extras, in the order in which conflicts are given.

    Rows of keys that this copy does not have, those of an extra that is not here, are left out.
    """
    found = list(features)
    excludes = {id(feature): list(feature.excludes) for feature in features}
    for extra in modules("features").values():
        for added in extra.FEATURES:
            place = found.index(added.behind) + 1
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


def _insert(rows: list[Exclusion], added: AddedRows) -> None:
    places = [place for place, row in enumerate(rows, 1) if row.key == added.behind]
    place = 0 if not added.behind else places[-1] if places else len(rows)
    rows[place:place] = added.rows
