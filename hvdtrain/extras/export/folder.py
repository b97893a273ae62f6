"""hvdtrain export --to FOLDER: a model of transformers as a folder that from_pretrained() loads, or
its adapters as one for PEFT."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hvdtrain.config import plugins
from hvdtrain.config.read import expand, read_run_config
from hvdtrain.config.schema import Config
from hvdtrain.config.sections.section import Given, is_object
from hvdtrain.core.folder import check_regular, put_in_place
from hvdtrain.errors import DONE, UserError
from hvdtrain.extras.trained_models.arguments import OF_A_FILE, read_former_run
from hvdtrain.extras.trained_models.of_data import WITHOUT_TARGETS, inputs_alone
from hvdtrain.extras.trained_models.saved_weights import load_checkpoint
from hvdtrain.training.failure import RankFailed
from hvdtrain.training.run_rank import ConnectedRank, on_connected_ranks
from hvdtrain.version import __version__

LIBRARY = "transformers:"  # begins model.name of such a run
_TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "preprocessor_config.json",
)
MARK = "hvdtrain.json"  # says that an export has written the folder
_WRITTEN = (*_TOKENIZER, "config.json", "generation_config.json", "adapter_config.json", MARK)


def export_folder(
    run: Path, to: Path, which: str, words: Sequence[str], adapters: str | None, force: bool
) -> int:
    """Writes the folder; returns the exit code. words: model.name=transformers:FOLDER, since the
    run alone may not choose what is imported. adapters: merged, separate, or None if not set.

    Raises UserError if the folder cannot be written.
    """
    check_folder(to, force)
    objects = _objects(run)
    names = [f"{section}.name={one.name}" for section, one in objects.items()]
    arguments = [f"resume={run}", *words, *names, "batch.per_rank=1", "comm.engine=single"]
    try:
        return on_connected_ranks(
            lambda rank: _write(rank, to, which, adapters),
            None,
            arguments,
            read_former_run=read_former_run,
            given=objects,
            what="export",
        )
    except RankFailed as failed:
        return failed.code


def _objects(run: Path) -> dict[str, Given]:
    """Replaces sections of the run: an export needs neither its targets nor the data of a script or
    of a user's code."""
    data = next((f"{one.value}" for one in read_run_config(run) if one.key == "data.name"), "")
    objects = {"data": OF_A_FILE} if is_object(data) or plugins.is_dotted(data) else {}
    return {**objects, "task": WITHOUT_TARGETS}


def check_folder(to: Path, force: bool) -> None:
    """Raises UserError if the folder cannot be written; called before the checkpoint is read."""
    if not os.path.isdir(to.parent):
        raise UserError(f"there is no folder {to.parent}", "--to", f"mkdir -p {to.parent}")
    if not os.path.lexists(to):
        return
    if not os.path.isdir(to) or os.path.islink(to):
        raise UserError(f"{to} is not a folder", "--to", "another name")
    names = sorted(os.listdir(to))
    base = to / "base"
    has_base = os.path.isdir(base)
    others = [
        name for name in names if not ((name == "base" and has_base) or _is_exported(to, name))
    ]
    if has_base:
        others += [
            f"base/{name}" for name in sorted(os.listdir(base)) if not _is_exported(base, name)
        ]
    if others or (names and MARK not in names):
        what = (
            f"{others[0]}, which no export has written"
            if others
            else f"files, but no {MARK} of an export"
        )
        raise UserError(f"{to} has {what}", "--to", "a folder that does not exist yet")
    if names and not force:
        raise UserError(f"{to} exists already", "--to", "--force replaces it; or another name")


def _is_exported(folder: Path, name: str) -> bool:
    is_of_weights = name.startswith(("model", "adapter_model")) and ".safetensors" in name
    return (name in _WRITTEN or is_of_weights) and os.path.isfile(folder / name)


def _write(rank: ConnectedRank, to: Path, which: str, adapters: str | None) -> int:
    config = rank.config
    if not config.model.name.startswith(LIBRARY) or config.framework != "torch":
        raise UserError(
            f"the run has model.name={config.model.name}, which is not a model of transformers",
            "--to",
            "--to model.safetensors",
        )
    has_adapters = bool(config.model.lora)
    if has_adapters and adapters is None:
        what = f"{config.resume} has adapters (model.lora)"
        fix = (
            "--adapters merged writes the whole model, --adapters separate only the adapters, "
            "for PEFT"
        )
        raise UserError(what, "command line of export", fix)
    if adapters is not None and not has_adapters:
        raise UserError(
            f"{config.resume} has no adapters",
            "--adapters",
            "leave it out: only a run with model.lora has adapters",
        )
    loaded = load_checkpoint(rank, which, inputs_alone)
    step = loaded.checkpoint.train_state.progress.step
    model: Any = getattr(loaded.learner, "model", None)
    unfinished = to.with_name(f".{to.name}.unfinished-{os.getpid()}")
    try:
        unfinished.mkdir()
        try:
            lines = _fill(unfinished, to, model, config, adapters == "separate")
            made = {"hvdtrain": __version__, "run": config.resume, "step": step}
            (unfinished / MARK).write_text(json.dumps(made) + "\n")
            put_in_place(unfinished, to)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    except OSError as error:
        raise UserError(
            f"cannot write {to}: {error.strerror or error}",
            "--to",
            "a folder that can be written and has room",
        ) from None
    described = loaded.learner.describe()
    print("\n".join([*loaded.notes, described, f"step {step} of {config.resume} -> {to}", *lines]))
    return DONE


def _fill(folder: Path, to: Path, model: Any, config: Config, separate: bool) -> list[str]:
    """Writes the files; returns lines for the user."""
    from hvdtrain.extras.export.saved_folder import (
        AdapterOptions,
        save_adapters,
        save_base,
        save_merged,
    )

    of_model = config.model
    kind = next(kind for kind in type(model).__mro__ if kind.__module__.startswith("transformers."))
    lines = _copy_tokenizer(folder, config)
    if not separate:
        save_merged(model, folder, of_model.lora_scale if of_model.lora else None)
        return [
            *lines,
            f"load it  from transformers import {kind.__name__}",
            f"         model = {kind.__name__}.from_pretrained('{to}')",
        ]
    base = _folder_of_base(config)
    if base is None:
        (folder / "base").mkdir()
        save_base(model, folder / "base")
        base = to.absolute() / "base"
        lines.append("base     the weights without adapters are in base/, as they are in no folder")
    alpha = of_model.lora_rank * of_model.lora_scale
    options = AdapterOptions(of_model.lora_rank, alpha, of_model.lora_dropout)
    save_adapters(model, folder, options, str(base))
    return [
        *lines,
        f"load it  from transformers import {kind.__name__}",
        "         from peft import PeftModel",
        f"         base = {kind.__name__}.from_pretrained('{base}')",
        f"         model = PeftModel.from_pretrained(base, '{to}')",
    ]


def _folder_of_base(config: Config) -> Path | None:
    """Returns the folder of transformers whose weights the job has loaded all of; None if there is
    none."""
    if config.model.weights is None or config.model.weights_skip or config.model.weights_names:
        return None
    folder = Path(str(config.model.weights)).expanduser().absolute()
    return folder if (folder / "config.json").is_file() else None


def _copy_tokenizer(folder: Path, config: Config) -> list[str]:
    """Copies the files of data.tokenizer, or without it those beside the model's config.json.
    Returns a line for the user."""
    asked = config.data.options.get("tokenizer")
    by_name = config.model.name.removeprefix(LIBRARY)
    source = expand(asked, "data.tokenizer") if asked else Path(by_name).expanduser()
    if source.is_file():
        files = {"tokenizer.json": source}
    else:
        files = {name: source / name for name in _TOKENIZER if (source / name).is_file()}
    for name, path in files.items():
        check_regular(path)
        shutil.copyfile(path, folder / name)
    if not files:
        return ["tokens   no tokenizer: neither data.tokenizer nor the model's folder has one"]
    if not (folder / "tokenizer_config.json").exists():
        plain = '{"tokenizer_class": "PreTrainedTokenizerFast"}\n'
        (folder / "tokenizer_config.json").write_text(plain)
    return [f"tokens   the tokenizer of {source}"]
