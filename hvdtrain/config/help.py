"""The output of --help and list: descriptions of keys from the schema and of options from the
plugins, without importing a framework."""

from __future__ import annotations

import textwrap
from pathlib import Path

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from hvdtrain.config import plugins, schema
from hvdtrain.config.plugins import options_of, shown_default
from hvdtrain.config.refusal import fix_of_key, takes
from hvdtrain.core import extras
from hvdtrain.errors import MEANINGS, UserError, closest, short

USAGE = """\
hvdtrain trains deep networks on many workers.

{commands}

  COMMAND --help     the options of a command; --help SECTION: its keys and the options of each name; --help KEY
  --help keys        the keys that most jobs set; --help all-keys: every key, one per line
  --max-time 3.5h    stop with a checkpoint before that time is over, exit code 75: the same command continues the job
  --print-config     the resolved configuration, ready for --config; --version: the version
  list               the valid names for data.name, task.name, model.name, optim.name, comm.engine, framework and log.trackers
  extras             more commands: hvdtrain extras lists those for features that few users need{more}

{keys}

Exit codes:
{codes}"""  # noqa: E501

# The lines of commands, by their places; those of extras are between them (core/extras.py).
_COMMANDS = {
    100: ("hvdtrain [--config FILE] [key=value ...]", "one process"),
    200: ("mpirun -np 8 -H n1:4,n2:4 hvdtrain [key=value ...]", "eight processes"),
}
_OF_LISTS = {
    "list": "hvdtrain list\n  prints the valid names of keys such as model.name",
    "extras": "hvdtrain extras\n  prints additional commands, for features that few users need",
}
# Keys that most jobs set, in the order of the schema: `--help keys`.
EVERYDAY = (
    "framework",
    "run",
    "resume",
    "epochs",
    "seed",
    "data.name",
    "data.root",
    "data.val_share",
    "data.readers",
    "task.name",
    "augment.crop",
    "augment.flip",
    "batch.size",
    "batch.per_rank",
    "batch.micro",
    "model.name",
    "model.label_smoothing",
    "model.recompute",
    "model.weights",
    "model.freeze",
    "optim.name",
    "optim.base_lr",
    "optim.base_batch",
    "optim.momentum",
    "optim.weight_decay",
    "optim.clip_norm",
    "recipe.scale",
    "recipe.warmup",
    "recipe.schedule",
    "recipe.growth",
    "norm.kind",
    "comm.engine",
    "comm.compression",
    "shard.stage",
    "speed.precision",
    "speed.device",
    "speed.compile",
    "stop.steps",
    "stop.target",
    "stop.patience",
    "checkpoint.every_minutes",
    "checkpoint.keep_best",
    "guard.max_time",
    "log.trackers",
)
_KEY_WIDTH = 34
_LINE_WIDTH = 118
# The folders of the plugins that a key names, with the condition.
_FOLDERS = {
    "data.name": schema.OPEN_SECTIONS["data"],
    "task.name": schema.OPEN_SECTIONS["task"],
    "model.name": schema.OPEN_SECTIONS["model"],
    "optim.name": schema.OPEN_SECTIONS["optim"],
    "model.name with framework=jax": plugins.folder_of("model", "jax"),
    "comm.engine": "comm",
    "framework": "frameworks",
    "log.trackers": "events/trackers",
}


def help_text(topic: str | None) -> str:
    """Returns one screen: commands, sections and exit codes, or the help of a topic. Raises
    UserError for an unknown topic.

    A topic is a section, whose keys and options of plugins are listed, one key or option, "keys"
    or "all-keys".
    """
    if topic is None:
        return _page()
    if topic in ("keys", "all-keys"):
        return _everyday_keys() if topic == "keys" else _every_key()
    if topic in _OF_LISTS:
        return _OF_LISTS[topic]
    if topic in schema.SECTIONS:
        lines = _rows(schema.SECTIONS[topic], f"{topic}.")
        return "\n".join(lines + (_option_rows(topic) if topic in schema.OPEN_SECTIONS else []))
    if (key := schema.OTHER_NAMES.get(topic, topic)) in schema.known_keys():
        return _key_text(key, schema.known_keys()[key])
    section, _, option = topic.partition(".")
    if section in schema.OPEN_SECTIONS and (lines := _option_rows(section, option)):
        return "\n".join(lines[1:])
    raise UserError(f"no such key or section: {short(topic)}", "--help", _nearest_topic(topic))


def _page() -> str:
    codes = "\n".join(f"  {code:3} {meaning}" for code, meaning in MEANINGS.items())
    without = [name for name in schema.known_keys() if "." not in name]
    lists = (
        f"Sections: {', '.join(schema.SECTIONS)}",
        f"Keys without a section: {', '.join(without)}",
    )
    keys = [line for each in lists for line in textwrap.wrap(each, 118, subsequent_indent="  ")]
    own = [(place, f"{usage:57}{says}") for place, (usage, says) in _COMMANDS.items()]
    commands = [f"  {line}" for _, line in sorted([*own, *extras.listed()])]
    more = "".join(
        f"\n  {name:19}{each.line}" for name, each in extras.commands().items() if each.line
    )
    return USAGE.format(codes=codes, keys="\n".join(keys), commands="\n".join(commands), more=more)


def _everyday_keys() -> str:
    """Lists the keys of EVERYDAY with their defaults and wrapped descriptions; a blank line
    separates sections."""
    lines = ["the keys that most jobs set, with their defaults"]
    before = None
    for key in EVERYDAY:
        section = key.rpartition(".")[0]
        if section != before:
            lines.append("")
        before = section
        row = _row(key, schema.known_keys()[key])
        indent = " " * (_KEY_WIDTH + 3)
        lines += textwrap.wrap(
            row,
            _LINE_WIDTH,
            subsequent_indent=indent,
            drop_whitespace=True,
            break_on_hyphens=False,
        )
    more = len(schema.known_keys()) - len(EVERYDAY)
    return "\n".join([*lines, "", f"{more} more keys: --help all-keys; one section: --help optim"])


def _every_key() -> str:
    """Lists every key of the schema, section by section."""
    lines = ["keys, defaults", *_rows(schema.Config, "")]
    for name, kind in schema.SECTIONS.items():
        lines += ["", *_rows(kind, f"{name}.")]
    return "\n".join(
        [
            *lines,
            "",
            "--help data, --help task, --help model, --help optim: the options of each name",
        ]
    )


def _nearest_topic(topic: str) -> str:
    section = closest(topic, list(schema.SECTIONS)) if "." not in topic else None
    return f"did you mean {section}?" if section else fix_of_key(topic)


def _key_text(key: str, info: FieldInfo) -> str:
    """Describes a key: its default, the complete description, and the values that it takes."""
    default = shown_default(info.get_default(call_default_factory=True)) or "nothing"
    text = f"{info.description}", f"takes {takes(info)}"
    wrapped = [line for each in text for line in textwrap.wrap(each, 118, break_on_hyphens=False)]
    return "\n  ".join([f"{key}: default {default}", *wrapped])


def list_text() -> str:
    """Lists every plugin on one line, with the first line of its file."""
    lines = []
    for key, folder in _FOLDERS.items():
        lines.append(key)
        lines += [
            f"  {name:14} {_first_paragraph(path)}" for name, path in plugins.files(folder).items()
        ]
    more = (
        "data.name, task.name, model.name also take package.module:Class, optim.name a class of "
        "torch.optim by its path, comm.engine auto"
    )
    return "\n".join([*lines, more])


def _rows(kind: type[BaseModel], prefix: str) -> list[str]:
    """Returns a row for each key of a section or option of a plugin: key=default, then its
    description."""
    return [
        _row(f"{prefix}{name}", info)
        for name, info in kind.model_fields.items()
        if info.annotation not in schema.SECTIONS.values()
    ]


def _row(key: str, info: FieldInfo) -> str:
    """Returns `key=default`, followed by its description."""
    text = f"{key}={shown_default(info.get_default(call_default_factory=True))}"
    return f"  {text:{_KEY_WIDTH}} {info.description or ''}".rstrip()


def _option_rows(section: str, only: str | None = None) -> list[str]:
    """Lists the options of each plugin of a section. only: list this option, for the plugins that
    have it."""
    lines: list[str] = []
    for key, folder in _FOLDERS.items():
        head, _, condition = key.partition(" ")
        if head != f"{section}.name":
            continue
        names: dict[Path, list[str]] = {}  # by file, because some names share a file
        for name, path in plugins.files(folder).items():
            names.setdefault(path, []).append(name)
        for path, shared in names.items():
            rows = [
                row
                for row in _rows(options_of(path), f"{section}.")
                if only is None or row.startswith(f"  {section}.{only}=")
            ]
            if rows or only is None:
                lines += [
                    "",
                    f"{head}={'|'.join(shared)} {condition}".rstrip()
                    + f": {_first_paragraph(path)}",
                    *rows,
                ]
    return lines


def _first_paragraph(path: Path) -> str:
    """Returns the first paragraph of a file's docstring on one line. Reads only the beginning,
    because parsing 46 files would take 0.1 s."""
    paragraph: list[str] = []
    with path.open() as file:
        for line in file:
            paragraph.append(line.strip())
            text = " ".join(paragraph).strip()
            if not line.strip() or text.removeprefix('"""').endswith('"""'):
                break
    return text.strip('"').strip()
