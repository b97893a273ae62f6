"""The options of a plugin: the keyword-only parameters of its build(), read from its source, so that no framework is imported."""

from __future__ import annotations

import ast
import functools
import inspect
import json
from pathlib import Path
from typing import Any, Literal  # Literal: an annotation of options

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from hvdtrain.config.other_words import right_key, without_a_key
from hvdtrain.config.refusal import expected
from hvdtrain.config.section import OpenSection
from hvdtrain.errors import UserError, closest, short

ANNOTATIONS = {"Literal": Literal, "Path": Path}  # what annotations of options may name, beside the types that Python has


def entry(path: Path) -> ast.FunctionDef:
    """The build() or connect() of a plugin, as a syntax tree."""
    body = ast.parse(path.read_text()).body
    return next(node for node in body if isinstance(node, ast.FunctionDef) and node.name in ("build", "connect"))


@functools.cache
def options_of(path: Path) -> type[BaseModel]:
    """The options of a plugin: types and defaults from the signature of its build(), descriptions from its docstring (`option: text`)."""
    build = entry(path)
    descriptions = _descriptions(ast.get_docstring(build) or "")
    fields: dict[str, Any] = {}
    for argument, default in zip(build.args.kwonlyargs, build.args.kw_defaults, strict=True):
        assert argument.annotation is not None and default is not None, f"{path}: {argument.arg} has no type or no default"
        field = Field(default=ast.literal_eval(default), description=descriptions.get(argument.arg))
        fields[argument.arg] = (ast.unparse(argument.annotation), field)
    config = ConfigDict(extra="forbid", strict=True, defer_build=True, protected_namespaces=())
    model: type[BaseModel] = create_model(path.stem, __config__=config, **fields)
    model.model_rebuild(_types_namespace=ANNOTATIONS)
    return model


def _descriptions(docstring: str) -> dict[str, str]:
    """The lines `option: text` of a docstring."""
    pairs = (line.strip().partition(": ") for line in docstring.splitlines())
    return {name: text for name, _, text in pairs if name.isidentifier()}


def convert(section: OpenSection, path: Path) -> dict[str, Any]:
    """The options that a section sets, as the types of the plugin's parameters: a list becomes a tuple, a text a path.

    Raises UserError for an unknown option and for a value of another type. Values are judged as JSON: "3" is no number.
    """
    model = options_of(path)
    try:
        converted = model.model_validate_json(json.dumps(dict(section.options)))
    except ValidationError as error:
        details = error.errors(include_url=False)[0]
        option = str(details["loc"][0])
        if details["type"] == "extra_forbidden":
            raise _unknown_option(section, option, model) from None
        key = section.full_key(option)
        value = section.options[option]
        fix = expected(key, model.model_fields[option], value)
        raise UserError(f"wrong value for {key}: {short(repr(value))}", section.where(option), fix) from None
    return {option: getattr(converted, option) for option in section.options}


def _unknown_option(section: OpenSection, option: str, model: type[BaseModel]) -> UserError:
    name: str = section.name  # type: ignore[attr-defined]
    options = {option: field.default for option, field in model.model_fields.items()}
    fields = list(type(section).model_fields)
    right = right_key(section.full_key(option), section.options[option]) or closest(option, [*options, *fields])
    suggestion = f"did you mean {right}?" if right else without_a_key(option) or f"known: {', '.join(fields)}"
    listed = ", ".join(f"{option}={shown(default)}" for option, default in options.items()) or "none"
    fix = f"{suggestion}{' ' if right else '; '}options of {name}: {listed}"
    return UserError(f"{section.section}.name={name} has no option {option}", section.where(option), fix)


def fix_of_parameters(section: OpenSection, signature: inspect.Signature) -> str:
    """The fix where the options of a section do not fit the user's own class: the parameter that a misspelt one resembles."""
    known = [*signature.parameters, *type(section).model_fields]
    unknown = next((option for option in section.options if option not in known), None)
    fix = f"give its parameters as {section.section}.<name>=<value>"
    if unknown is None:
        return fix
    close = closest(unknown, known)
    right = right_key(section.full_key(unknown)) or (close and section.full_key(close))
    return f"did you mean {right}? {fix}" if right else fix


def shown(default: Any) -> str:
    """A default as one would type it: `[16,32]`, `true`, nothing for null."""
    return "" if default is None else default if isinstance(default, str) else json.dumps(default, separators=(",", ":"))
