"""Opens a set of the data with the plugin of data.name or the user's own function."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType

from hvdtrain.config import plugins
from hvdtrain.config.schema import Config
from hvdtrain.config.sections.section import COMMAND_LINE
from hvdtrain.core.extras import implementing_module
from hvdtrain.data.configured.pad import padding_of, refuse_lengths
from hvdtrain.data.option_error import OptionError
from hvdtrain.data.source import Source, Split, Unfinished
from hvdtrain.errors import UserError

Finish = Callable[[Unfinished, Callable[[], Unfinished]], Source]


@contextlib.contextmanager
def with_keys(config: Config) -> Iterator[None]:
    """Makes errors in an option of the data set name its key, and where it was set. If a run's data
    are not there, its path may belong to another folder."""
    try:
        yield
    except OptionError as error:
        raise UserError(error.what, config.where(f"data.{error.where}"), error.fix) from None
    except UserError as error:
        root = root_of(config)
        is_of_a_run = config.resume not in ("auto", "no") and config.origin("data.root") != (
            COMMAND_LINE
        )
        if is_of_a_run and root is not None and not (root.is_absolute() or root.exists()):
            error.fix += (
                f"; {root} is a path in the folder where the run was started, not in {Path.cwd()}"
            )
        raise


def open_split(
    config: Config, split: Split, finish: Finish, kept: Callable[[], tuple[str, ...]]
) -> Source:
    """Opens a set with the plugin of data.name or the user's function. Raises UserError.

    finish: see CommonArray. kept: see as_source(); it is only called for user data.
    """
    if plugins.is_users_own(config.data):
        return _open_own(config, split, kept)
    refuse_lengths(config)
    plugin = plugin_of(config)
    make = plugin.build
    options = plugins.convert_options(config.data, "data/datasets")
    _check_workers(config, make, options)
    root = root_of(config)
    with with_keys(config):
        if config.data.stage is not None:
            from hvdtrain.data.files.selection import Staging
            from hvdtrain.data.files.staging import stage_data

            root, options = stage_data(
                config.data.name,
                root,
                options,
                config.data.stage,
                config.where("data.stage"),
                getattr(plugin, "STAGING", Staging()),
            )
        found: Source | Unfinished = make(config.data.name, root, split, **options)
        if isinstance(found, Unfinished):
            samples = found
            return finish(
                samples,
                lambda: (
                    samples
                    if split == "train"
                    else make(config.data.name, root, "train", **options)
                ),
            )
    found = _changed(config, found.cropped(config.augment.resized_crop))
    found = found.with_answers() if config.task.options.get("loss_on") == "assistant" else found
    return found.read_by(config.data.workers) if config.data.workers else found


def _changed(config: Config, source: Source) -> Source:
    """Returns the source with data.gaps and data.shift. Raises UserError."""
    if not config.data.gaps and config.data.shift is None:
        return source
    from hvdtrain.data.configured.gaps import with_gaps

    with with_keys(config):
        gaps = config.data.gaps
        if config.data.shift is not None and "y" not in source.fields:  # y is x, some steps later
            gaps = list(dict.fromkeys("x" if name == "y" else name for name in gaps))
        found = with_gaps(source, gaps)
        if config.data.shift is None:
            return found
        later = implementing_module("data.shift")
        pairs: Source = later.shifted(
            found, config.data.shift, later.times_of(found, array_of_x(config))
        )
        return pairs


def array_of_x(config: Config) -> str:
    """Returns the first array of x, as data.fields names it."""
    texts = (config.data.options.get("fields") or {}).get("x", "x")
    return texts if isinstance(texts, str) else str(texts[0])


def _check_workers(
    config: Config, make: Callable[..., object], options: Mapping[str, object]
) -> None:
    """Raises UserError if worker processes would have nothing to read. make: build() of the data
    set."""
    # the workers of a data set of image files, else None
    packed = options.get("packed", _default_of(make, "packed"))
    reads_files = packed is False or _default_of(make, "cache_mb")
    if config.data.workers is None or (reads_files and not config.data.is_of_texts):
        return
    what = (
        f"data.workers={config.data.workers} starts processes that decode images or read your own "
        "Dataset; "
    )
    what += f"data.name={config.data.name} has " + (
        "its pixels in array files (data.packed=true)" if packed else "threads"
    )
    fix = (
        "data.packed=false, or leave data.workers out"
        if packed
        else "data.readers=N, or leave it out"
    )
    raise UserError(what, config.where("data.workers"), fix)


def _default_of(make: Callable[..., object], option: str) -> object:
    """Returns the default of a parameter; None if there is no such parameter."""
    parameter = inspect.signature(make).parameters.get(option)
    return None if parameter is None else parameter.default


def _open_own(config: Config, split: Split, kept: Callable[[], tuple[str, ...]]) -> Source:
    """Calls the user's package.module:function, with `split` and `root` if it has parameters with
    these names.

    Raises UserError if as_source() does not support the result.
    """
    from hvdtrain.data.user_data.as_source import as_source

    where = config.where("data.name")
    if config.data.stage is not None:
        raise UserError(
            "data.stage copies the files of hvdtrain's own data sets",
            config.where("data.stage"),
            "leave it out",
        )
    with with_keys(config):
        known = {"name": config.data.name, "root": root_of(config), "split": split}
        found = plugins.call_own(config.data, known)
        if config.data.opener:
            source: Source = plugins.named(config.data.opener)(
                config,
                found,
                lambda: plugins.call_own(config.data, known),
                split,
                f"{config.data.name}, {split}",
                where,
                kept(),
            )
            return source
        source = as_source(
            found,
            f"{config.data.name}, {split}",
            where,
            config.data.workers,
            kept(),
            padding_of(config),
            config.data.gaps,
        )
        return _changed(config, source)


def plugin_of(config: Config) -> ModuleType:
    return plugins.load("data/datasets", config.data.name, config.where("data.name"))


def root_of(config: Config) -> Path | None:
    return Path(config.data.root).expanduser() if config.data.root else None
