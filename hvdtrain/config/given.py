"""Objects that a script gives to hvdtrain.train() where a configuration has a name: model=Net() is model.name=<object of mine:Net>."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

_PREFIX = "<object of "


class Given(NamedTuple):
    """What a script gives for one section."""

    name: str | None  # that stands in the configuration; None: the section keeps its own
    make: Callable[..., Any]  # what package.module:function would be; of a section that keeps its name: task -> task
    objects: Mapping[str, Any]  # whose code and values must be the same on all ranks, by what a message calls them
    at_end: Callable[[Any], None] = lambda learner: None  # once training is over, on every rank, while the ranks are connected


def name_of(thing: Any) -> str:
    """<object of mine:Net>: the class of an object, or the function itself."""
    named = thing if hasattr(thing, "__qualname__") and hasattr(thing, "__module__") else type(thing)  # a generator has no module
    return f"{_PREFIX}{named.__module__}:{named.__qualname__}>"


def is_object(name: str) -> bool:
    """Whether it is the name of an object, which only the script that gave it has."""
    return name.startswith(_PREFIX)


def class_of(name: str) -> str:
    """The last word of the name of an object: Net of <object of mine:Net>, lambda of <object of mine:make.<locals>.<lambda>>."""
    return re.findall(r"\w+", name)[-1]


def go_on(section: str) -> str:
    """How a job is continued, evaluated and used whose object only a script has."""
    again = "start that script again, with resume=RUN in its hvdtrain.train()"
    by_path = {"model": "; or model.name=package.module:Class, which makes the same model", "data": "; or other data: data.name="}
    return f"{again}; hvdtrain export RUN has the weights{by_path.get(section, '')}"
