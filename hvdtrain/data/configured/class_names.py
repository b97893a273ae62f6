"""data.class_names: the names of the classes, from the data set or the user."""

from __future__ import annotations

import json
from collections.abc import Sequence

from hvdtrain.config.schema import Config
from hvdtrain.config.yaml_reader import MOST_BYTES
from hvdtrain.data.source import LabelledImages, Source
from hvdtrain.errors import UserError


def with_class_names(config: Config, source: Source) -> Config:
    """Returns the configuration with the names of the classes, if the data set or the user gives
    them.

    Raises UserError if both give different names, or if the number of names is not the number of
    classes.
    """
    where = config.where("data.class_names")
    own = list(source.class_names)
    if not isinstance(source, LabelledImages) and not own:
        if config.data.class_names is None:
            return config
        raise UserError("the data have no classes to name", where, "leave data.class_names out")
    given = config.data.class_names
    if given is None:
        return (
            config.replace(data=config.data.replace(class_names=own))
            if own and _fit_into_file(own)
            else config
        )
    if own and given != own:
        wrong = next(
            (
                f"class {label} is {name}"
                for label, name in enumerate(own)
                if name not in given[label : label + 1]
            ),
            "it has fewer",
        )
        raise UserError(
            f"data.class_names differs from the data set: {wrong}",
            where,
            "leave it out, or give data.root the data it is of",
        )
    classes = source.classes if isinstance(source, LabelledImages) else len(own)
    if len(given) != classes:
        raise UserError(
            f"{len(given)} names for {classes} classes",
            where,
            "one name for each class, by label",
        )
    return config


def _fit_into_file(names: Sequence[str]) -> bool:
    """Whether config.yaml can store the names and be read again."""
    return sum(len(json.dumps(name)) + 8 for name in names) < MOST_BYTES // 2 and not any(
        "${" in name for name in names
    )
