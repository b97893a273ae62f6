"""`hvdtrain schema`: prints the JSON Schema of configuration files, with which an editor completes
keys and names and marks mistakes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hvdtrain.config import plugins
from hvdtrain.config.plugins import options_of
from hvdtrain.config.schema import OPEN_SECTIONS, OTHER_NAMES, SECTIONS, Config
from hvdtrain.errors import DONE, UserError

USAGE = """\
hvdtrain schema > schema.json
  prints the JSON Schema of configuration files; an editor completes and checks a file with the first line
  # yaml-language-server: $schema=schema.json"""  # noqa: E501


def schema(arguments: Sequence[str]) -> int:
    """Prints the schema; returns the exit code. Raises UserError for an argument."""
    if {"-h", "--help"} & set(arguments):
        print(USAGE)
        return DONE
    if arguments:
        raise UserError(
            f"schema takes no arguments: {' '.join(arguments)}",
            "command line",
            "hvdtrain schema > schema.json",
        )
    print(json.dumps(json_schema(), indent=1))
    return DONE


Schema = dict[str, Any]

REFERENCE: Schema = {
    "type": "string",
    "pattern": r"^\$\{[A-Za-z_][A-Za-z0-9_.]*\}$",
    "description": "the value of another key: ${batch.size}",
}

IMPORT_PATH: Schema = {
    "type": "string",
    "pattern": "[.:]",
    "description": "a class of your own: package.module:Class",
}


def json_schema() -> Schema:
    """Returns the schema, draft 2020-12, ready for json.dumps().

    It accepts what read_file() accepts: nested and dotted keys, empty sections, `${key}` for a
    value. Options of plugins:
    - If the file names a plugin (`model: {name: mlp, ...}`), only the options of that plugin are
    valid. - If it names no plugin, which the command line may do, the options of every plugin of
    the section are valid. - If data.name, task.name, model.name or optim.name is an import path,
    every option is valid, because it is user code.
    """
    schema = _without_titles(Config.model_json_schema())
    definitions = schema["$defs"]
    _add_names(schema["properties"], definitions)
    _add_other_names(schema)
    dotted: dict[str, Schema] = {}
    rules: list[Schema] = []
    for section, kind in SECTIONS.items():
        definition = definitions[kind.__name__]
        definition["type"] = ["object", "null"]  # null: an empty section
        if section in OPEN_SECTIONS:
            _add_options(definition, _options_by_name(section))
            rules.append(_dotted_options_rule(section, definition["properties"]))
            dotted[rf"^{section}\.."] = {}
        for key in definition["properties"]:
            dotted[f"^{re.escape(f'{section}.{key}')}$"] = {
                "$ref": f"#/$defs/{kind.__name__}/properties/{key}"
            }
    for definition in (schema, *definitions.values()):
        _accept_references(definition)
    definitions["reference"] = REFERENCE
    head = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A configuration of hvdtrain",
    }
    return head | schema | {"patternProperties": dotted, "allOf": rules}


def _without_titles(tree: Any) -> Any:
    """Removes the titles that pydantic derives from names: an editor would show `Max Steps` for
    max_steps."""
    if isinstance(tree, list):
        return [_without_titles(inner) for inner in tree]
    if not isinstance(tree, dict):
        return tree
    return {
        key: _without_titles(inner)
        for key, inner in tree.items()
        if not (key == "title" and isinstance(inner, str))
    }


def _add_names(properties: Schema, definitions: Mapping[str, Schema]) -> None:
    """Lists the names of plugins instead of `a text`."""
    properties["framework"] |= {"enum": sorted(plugins.files("frameworks"))}
    definitions["CommConfig"]["properties"]["engine"] |= {
        "enum": ["auto", *sorted(plugins.files("comm"))]
    }
    definitions["LogConfig"]["properties"]["trackers"]["items"] = {
        "enum": sorted(plugins.files("events/trackers"))
    }


def _add_other_names(schema: Schema) -> None:
    """Adds the other names that the reader accepts for a key."""

    def place(key: str) -> tuple[Schema, str, str]:
        """Returns the properties that hold a key, its name there, and how a $ref points to them."""
        section, _, name = key.rpartition(".")
        if not section:
            return schema["properties"], name, "#/properties"
        kind = SECTIONS[section].__name__
        return schema["$defs"][kind]["properties"], name, f"#/$defs/{kind}/properties"

    for other, key in OTHER_NAMES.items():
        properties, name, _ = place(other)
        _, own_name, pointer = place(key)
        properties[name] = {"$ref": f"{pointer}/{own_name}"}


def _options_by_name(section: str) -> dict[str, dict[str, Schema]]:
    """Returns name -> the options of the plugins of that name, by option: a model may have one for
    torch and one for jax."""
    folders = [OPEN_SECTIONS[section]] + (
        [plugins.folder_of("model", "jax")] if section == "model" else []
    )
    options: dict[str, dict[str, Schema]] = {}
    for folder in folders:
        for name, path in plugins.files(folder).items():
            options[name] = _properties(path) | options.get(name, {})
    return options


def _properties(path: Path) -> dict[str, Schema]:
    properties: dict[str, Schema] = _without_titles(options_of(path).model_json_schema()).get(
        "properties", {}
    )
    return properties


def _add_options(definition: Schema, options: Mapping[str, Mapping[str, Schema]]) -> None:
    """Adds the names of the plugins of a section, their options, and rules for which of them belong
    together."""
    keys = list(definition["properties"])
    names = {"enum": sorted(options)}
    definition["properties"]["name"] = {
        **{key: text for key, text in definition["properties"]["name"].items() if key != "type"},
        "anyOf": [names, IMPORT_PATH],
    }
    for option in sorted({option for plugin in options.values() for option in plugin}):
        definition["properties"][option] = _of_any(
            {name: plugin[option] for name, plugin in options.items() if option in plugin}
        )
    of_one = [
        _if_named(
            {"enum": names},
            {"properties": dict(options[names[0]]), **_only([*keys, *options[names[0]]])},
        )
        for names in _alike(options)
    ]
    of_any = _only(definition["properties"])
    definition["additionalProperties"] = True
    definition["allOf"] = [*of_one, _if_named(IMPORT_PATH, {}) | {"else": of_any}]


def _alike(options: Mapping[str, Mapping[str, Schema]]) -> list[list[str]]:
    """Groups the names whose plugins have the same options."""
    groups: list[list[str]] = []
    for name, plugin in options.items():
        same = next((group for group in groups if options[group[0]] == plugin), None)
        groups.append([name]) if same is None else same.append(name)
    return groups


def _of_any(by_name: Mapping[str, Schema]) -> Schema:
    """Merges an option that several plugins define, each with its own type, default and
    description."""
    first = next(iter(by_name.values()))
    if all(schema == first for schema in by_name.values()):
        return first | {"description": f"{', '.join(by_name)}: {first['description']}"}
    types: list[Schema] = []
    for schema in by_name.values():
        kind = {
            key: value for key, value in schema.items() if key not in ("description", "default")
        }
        if kind not in types:
            types.append(kind)
    return {
        "description": "; ".join(
            f"{name}: {schema['description']}" for name, schema in by_name.items()
        ),
        "anyOf": types,
    }


def _if_named(name: Schema, then: Schema) -> Schema:
    return {"if": {"required": ["name"], "properties": {"name": name}}, "then": then}


def _only(keys: Iterable[str]) -> Schema:
    return {"propertyNames": {"enum": list(keys)}}


def _dotted_options_rule(section: str, properties: Mapping[str, Schema]) -> Schema:
    """Rejects an unknown dotted key, `model.widhts`, unless the file names a class of the user."""
    nested = {
        "required": [section],
        "properties": {
            section: {"type": "object", "required": ["name"], "properties": {"name": IMPORT_PATH}}
        },
    }
    dotted = {"required": [f"{section}.name"], "properties": {f"{section}.name": IMPORT_PATH}}
    unknown = rf"^{section}\.(?!({'|'.join(properties)})$)"
    return {
        "if": {"anyOf": [nested, dotted]},
        "else": {"propertyNames": {"not": {"pattern": unknown}}},
    }


def _accept_references(definition: Schema) -> None:
    """Allows `${key}` for every value of an object, and in the rules for its options."""
    for part in (definition, *(rule["then"] for rule in definition.get("allOf", ()))):
        part["properties"] = {
            key: _or_reference(value) for key, value in part.get("properties", {}).items()
        }


def _or_reference(value: Schema) -> Schema:
    """Allows `${key}` for a value; for a string also a number or a boolean, which is read as a
    string.

    Uses one `type` if possible, because `minimum` only applies to numbers and `pattern` only to
    strings; messages are clearer than with anyOf.
    """
    if "$ref" in value:  # the value is a section
        return value
    outer = {key: text for key, text in value.items() if key in ("description", "default")}
    inner = {key: rule for key, rule in value.items() if key not in outer}
    alternatives = inner.get("anyOf", [inner])
    types = [alternative.get("type") for alternative in alternatives]
    has_rules = any({"enum", "const", "pattern"} & set(alternative) for alternative in alternatives)
    if (
        has_rules
        or not all(isinstance(kind, str) for kind in types)
        or len(set(types)) < len(types)
    ):
        return outer | {"anyOf": [*alternatives, {"$ref": "#/$defs/reference"}]}
    bounds = {
        key: rule
        for alternative in alternatives
        for key, rule in alternative.items()
        if key not in ("type", "format")
    }
    if "string" in types:
        return outer | bounds | {"type": [*types, "number", "boolean"]}
    return outer | bounds | {"type": [*types, "string"], "pattern": REFERENCE["pattern"]}
