"""Extras: folders of hvdtrain/extras, each a feature that most users never need. No code outside a
folder names it, so hvdtrain works without the folder."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, Literal, NamedTuple

from hvdtrain.errors import UserError

PACKAGE = Path(__file__).parents[1]


class Command(NamedTuple):
    """A command of an extra. module: has the function of its name, with _ for -.

    usage: its help text; `hvdtrain extras` and `hvdtrain --help` show the first line. trains: it
    starts jobs, so a signal that asks for a checkpoint does not kill it. on_ranks: --num-nodes and
    so on start it on ranks. launched: so does `launch -- COMMAND`. listed_at: its place among the
    lines of `hvdtrain --help`, whose own lines have 100, 200, ...; 0 if it is not listed there.
    shows_run: its argument is a run, and the lines at the end of a job suggest it. line: what
    `hvdtrain --help` says below `list` and `extras`, instead.
    """

    module: str
    usage: str
    trains: bool = False
    on_ranks: bool = False
    launched: bool = False
    listed_at: int = 0
    shows_run: bool = False
    line: str = ""


class Mode(NamedTuple):
    """An option of a command that an extra implements, such as `plan --pipeline`. module: has the
    function of its name, plan_pipeline, which runs instead of the command.

    usage: its text in the command's help. options: further options that select it. listed_at: see
    Command.
    """

    module: str
    usage: str
    options: tuple[str, ...] = ()
    listed_at: int = 0


class Extra(NamedTuple):
    """The description of an extra for the rest of hvdtrain: the value EXTRA of its package, data
    only.

    says: one sentence. needs: the extras whose modules it imports, without which it does not work.
    modes: what `COMMAND --OPTION` runs. Plugins need no entry:
    extras/NAME/FOLDER/PLUGIN.py is found like FOLDER/PLUGIN.py. aliases: by folder, further names
    of plugins. image_files: the data.name of images in files, whose size data.size sets.
    token_images: the data.name whose tokens are pixels, which log.samples and `hvdtrain sample`
    show by read_pictures() of its module. Keys and features need no entry, either:
    config/sections/extra_keys.py finds them in extras/NAME/keys.py, and features/of_extras.py in
    extras/NAME/features.py.

    Suffix of a user's file, or of a folder that counts as a file -> the data.name that reads it:
    data_files of arrays, in blocks; tables, whose columns have names; archives of arrays by name;
    document_files of texts and chats.
    Suffix of a file -> the module: number_files, whose read_numbers() reads what `predict --data`
    takes; map_files, whose check(), maps_of() and write() store what `predict --to` writes.
    streams: what to set so that data that only give their next sample are read.
    column_encoder: the module that encodes columns of text, dates and missing cells for
    data/input_encoding.py. implements: a key of hvdtrain, a value as in shard.stage=3, an argument
    as in ctx.prepare(name=), or a function as hvdtrain.predict() -> the module that does what it
    selects; without the extra it is an error. maps: the package whose modules moved_masks, pictures
    and mask_files serve tasks with masks or maps. library_metrics: the module whose metric_of()
    converts a metric of torchmetrics. words: the module with tables of other tools' keys and values
    for config/words_of_other_tools.py. libraries: library of torch models -> the module whose
    model_of() makes those of model.name=LIBRARY:NAME, and whose in_names_of() renames the arrays of
    a file for one of them.

    In every job, each a "module:function": gauges, the measurements that
    training/telemetry/telemetry.py creates; environment, which records what the job runs with, and
    returns it as fields; throughput, which measures its devices for
    training/telemetry/throughput.py.
    """

    status: Literal["stable", "experimental"]
    says: str
    needs: tuple[str, ...] = ()
    commands: Mapping[str, Command] = MappingProxyType({})
    modes: Mapping[str, Mode] = MappingProxyType({})
    aliases: Mapping[str, Mapping[str, str]] = MappingProxyType({})
    data_files: Mapping[str, str] = MappingProxyType({})
    tables: Mapping[str, str] = MappingProxyType({})
    archives: Mapping[str, str] = MappingProxyType({})
    document_files: Mapping[str, str] = MappingProxyType({})
    number_files: Mapping[str, str] = MappingProxyType({})
    map_files: Mapping[str, str] = MappingProxyType({})
    column_encoder: str = ""
    implements: Mapping[str, str] = MappingProxyType({})
    maps: str = ""
    library_metrics: str = ""
    streams: str = ""
    words: str = ""
    libraries: Mapping[str, str] = MappingProxyType({})
    gauges: tuple[str, ...] = ()
    environment: str = ""
    throughput: str = ""
    image_files: tuple[str, ...] = ()
    token_images: tuple[str, ...] = ()


@functools.cache
def extras() -> Mapping[str, Extra]:
    """Returns name -> extra, for every installed extra, sorted by name. Raises UserError if one
    needs an extra that is not installed."""
    names = sorted(path.parent.name for path in PACKAGE.glob("extras/*/__init__.py"))
    packages = {name: importlib.import_module(f"{PACKAGE.name}.extras.{name}") for name in names}
    found: dict[str, Extra] = {name: package.EXTRA for name, package in packages.items()}
    for name, extra in found.items():
        for needed in extra.needs:
            if needed not in found:
                raise UserError(
                    f"the extra {name} needs the extra {needed}, which is not installed",
                    f"{PACKAGE / 'extras'}",
                    f"add the folder {needed}, or delete the folder {name}",
                )
    return MappingProxyType(found)


def needed_first(found: Mapping[str, Extra]) -> list[str]:
    """Returns the names of extras in their order, except that an extra follows those that it
    needs."""
    order: dict[str, None] = {}
    reached: set[str] = set()

    def add(names: Iterable[str]) -> None:
        for name in names:
            if name not in reached:
                reached.add(name)
                add(found[name].needs)
                order[name] = None

    add(found)
    return list(order)


def extras_with(folder: str) -> list[Extra]:
    """Returns the extras that have this folder of plugins."""
    return [
        extra for name, extra in extras().items() if (PACKAGE / "extras" / name / folder).is_dir()
    ]


def modules(name: str) -> dict[str, ModuleType]:
    """Returns the module of this name from every extra that has it, by the extra's name; that of an
    extra follows those of the extras that it needs. A job imports no other module of an extra
    unless it uses the extra."""
    return {
        extra: importlib.import_module(f"{PACKAGE.name}.extras.{extra}.{name}")
        for extra in needed_first(extras())
        if (PACKAGE / "extras" / extra / f"{name}.py").is_file()
    }


@functools.cache
def commands() -> Mapping[str, Command]:
    """Returns name -> command, for every command of an extra."""
    return MappingProxyType(
        {name: each for extra in extras().values() for name, each in extra.commands.items()}
    )


def trains(name: str) -> bool:
    """Whether a command of an extra starts jobs."""
    return name in commands() and commands()[name].trains


def shows_run() -> list[str]:
    """Returns the commands of extras that show a run."""
    return [name for name, each in commands().items() if each.shows_run]


def modes(command: str) -> dict[str, Mode]:
    """Returns --OPTION -> the mode, for every mode of a command in an extra."""
    return {
        name.split()[1]: mode
        for extra in extras().values()
        for name, mode in extra.modes.items()
        if name.split()[0] == command
    }


def listed() -> list[tuple[int, str]]:
    """Returns the place and the text of each line that extras add to `hvdtrain --help`."""
    lines: list[tuple[int, str]] = []
    for extra in extras().values():
        lines += [(each.listed_at, each.usage) for each in extra.commands.values()]
        lines += [(mode.listed_at, mode.usage) for mode in extra.modes.values()]
    return [(place, usage.partition("\n")[0]) for place, usage in lines if place]


def aliases(folder: str) -> dict[str, str]:
    """Returns name -> the extra's plugin that it stands for, in a folder of plugins."""
    names: dict[str, str] = {}
    for extra in extras_with(folder):
        names |= extra.aliases.get(folder, {})
    return names


def plugins_of_extras(folder: str) -> list[str]:
    """Returns the file names of the plugins that extras have in a folder, without aliases."""
    found = {path.stem for path in PACKAGE.glob(f"extras/*/{folder}/*.py")} - {"__init__"}
    return sorted(found - set(aliases(folder).values()))


def data_files() -> dict[str, str]:
    """Returns suffix -> the data.name of the extra that reads such files."""
    return {
        end: name
        for extra in extras_with("data/datasets")
        for end, name in extra.data_files.items()
    }


def tables() -> dict[str, str]:
    """Returns suffix -> the data.name of an extra that reads such tables."""
    return {end: name for extra in extras().values() for end, name in extra.tables.items()}


def archives() -> dict[str, str]:
    """Returns suffix -> the data.name of an extra that reads such files of arrays by name."""
    return {end: name for extra in extras().values() for end, name in extra.archives.items()}


def document_files() -> dict[str, str]:
    """Returns suffix -> the data.name of an extra that reads texts and chats in such files."""
    return {end: name for extra in extras().values() for end, name in extra.document_files.items()}


def number_files() -> dict[str, str]:
    """Returns suffix -> the module of an extra that reads such files for `predict`."""
    return {end: name for extra in extras().values() for end, name in extra.number_files.items()}


def column_encoder() -> str | None:
    """Returns the module of an extra that encodes columns of tables; None if there is none."""
    found = (extra.column_encoder for extra in extras().values() if extra.column_encoder)
    return next(found, None)


def implementation(name: str) -> str | None:
    """Returns the module of an extra that implements a key, value or function of hvdtrain; None if
    there is none."""
    found = (extra.implements[name] for extra in extras().values() if name in extra.implements)
    return next(found, None)


def implementing_module(key: str) -> Any:
    """Returns the module of an extra that implements a key or function. Raises UserError without
    that extra; features reject such keys before the first step."""
    module = implementation(key)
    if module is None:
        what = f"this copy of hvdtrain has no extra that does {key}"
        raise UserError(what, key, "leave it out; `hvdtrain extras` lists the installed extras")
    return importlib.import_module(module)


def stages() -> str | None:
    """Returns the module of an extra that copies files for data.stage; None if there is none."""
    return implementation("data.stage")


def maps() -> str | None:
    """Returns the package of an extra for masks and maps; None if there is none."""
    return next((extra.maps for extra in extras().values() if extra.maps), None)


def library_metrics() -> str | None:
    """Returns the module of an extra for metrics of torchmetrics; None if there is none."""
    found = (extra.library_metrics for extra in extras().values() if extra.library_metrics)
    return next(found, None)


def maps_module(name: str, where: str) -> Any:
    """Returns a module of the extra for masks and maps. Raises UserError without that extra; where:
    what needs it."""
    package = maps()
    if package is None:
        what = "this copy of hvdtrain has no extra for masks and maps"
        raise UserError(what, where, "leave it out; `hvdtrain extras` lists the installed extras")
    return importlib.import_module(f"{package}.{name}")


def streams() -> str:
    """Returns what to set so that an extra reads data that only give their next sample; empty if
    none does."""
    return next((extra.streams for extra in extras().values() if extra.streams), "")


def load(module: str | None, does: str, key: str, where: str) -> Any:
    """Imports the module of an extra for a key of the job. Raises UserError if there is none. does:
    "loads weights"; where: the key was set."""
    if module is None:
        raise UserError(
            f"this copy of hvdtrain has no extra that {does}",
            where,
            f"leave {key} out; `hvdtrain extras` lists the installed extras",
        )
    return importlib.import_module(module)


def words() -> str | None:
    """Returns the module of an extra with words of other tools; None if there is none."""
    return next((extra.words for extra in extras().values() if extra.words), None)


def libraries() -> dict[str, str]:
    """Returns library -> the module of an extra that makes its models."""
    return {name: module for extra in extras().values() for name, module in extra.libraries.items()}


def gauges_of_every_job() -> list[str]:
    """Returns "module:function" of each measurement that extras make in every job."""
    return [name for extra in extras().values() for name in extra.gauges]


def environment_recorder() -> str:
    """Returns "module:function" that records what a job runs with; empty if no extra does."""
    return next((extra.environment for extra in extras().values() if extra.environment), "")


def throughput_measure() -> str:
    """Returns "module:function" that measures a job's devices; empty if no extra does."""
    return next((extra.throughput for extra in extras().values() if extra.throughput), "")


def map_files() -> dict[str, str]:
    """Returns suffix -> the module of an extra that writes such files of maps."""
    return {end: module for extra in extras().values() for end, module in extra.map_files.items()}


def image_files() -> tuple[str, ...]:
    """Returns the data.name of extras that read image files."""
    return tuple(name for extra in extras_with("data/datasets") for name in extra.image_files)


def token_images() -> tuple[str, ...]:
    """Returns the data.name of extras whose tokens are the pixels of images."""
    return tuple(name for extra in extras_with("data/datasets") for name in extra.token_images)


def keys_of(name: str) -> list[str]:
    """Returns the configuration keys of an extra."""
    found = modules("keys").get(name)
    return [kind.full_key(key) for kind in found.KEYS for key in kind.model_fields] if found else []


def list_text() -> str:
    """Returns the output of `hvdtrain extras`: each extra with its status, the extras that it
    needs, its commands and its keys."""
    lines = []
    for name, extra in extras().items():
        lines.append(f"{name} ({extra.status}): {extra.says}")
        lines += [f"  needs {needed}" for needed in extra.needs]
        usages = [each.usage for each in extra.commands.values()]
        usages += [mode.usage for mode in extra.modes.values()]
        lines += [f"  {usage.partition(chr(10))[0]}" for usage in usages]
        lines += [f"  {key}" for key in keys_of(name)]
    return "\n".join(lines or ["this copy of hvdtrain has no extras"])
