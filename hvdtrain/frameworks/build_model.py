"""What model.name means, whatever the framework: a plugin of a models folder, or the user's own class or function."""

from __future__ import annotations

import inspect
from typing import Any

from hvdtrain.config import plugins
from hvdtrain.config.schema import Config
from hvdtrain.errors import UserError
from hvdtrain.frameworks.learner import Task


def build_model(config: Config, task: Task, folder: str) -> Any:
    """What build() of a plugin in `folder` returns, or the user's own package.module:name with the options of `model`.

    The user's own gets shape and classes too, where its parameters have these names. Raises UserError where options do not fit.
    """
    name, options, where = config.model.name, config.model.options, config.where("model.name")
    if not plugins.is_dotted(name):
        build = plugins.load(folder, name, where).build
        return build(name, task.shape, task.classes, **plugins.convert_options(config.model, folder))
    constructor = plugins.load_dotted(name, where)
    signature = inspect.signature(constructor)
    known: dict[str, Any] = {"shape": task.shape, "classes": task.classes}
    arguments = {key: value for key, value in known.items() if key in signature.parameters} | dict(options)
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise UserError(f"{name}{signature} does not fit: {error}", where, "give its parameters as model.<name>=<value>") from None
    return constructor(**arguments)
