"""hvdtrain export: weights alone, the keras.Model of a run with --to model.keras, a folder for
transformers, or a file with the computation, with the weights of a checkpoint."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hvdtrain.config.read import expand, read_run_config
from hvdtrain.core.folder import Folder
from hvdtrain.errors import DONE, UserError
from hvdtrain.extras.export import weights
from hvdtrain.extras.trained_models.arguments import read_former_run
from hvdtrain.extras.trained_models.saved_weights import load_checkpoint
from hvdtrain.extras.trained_models.target import refuse_inputs
from hvdtrain.training.failure import RankFailed
from hvdtrain.training.run_rank import ConnectedRank, on_connected_ranks


def export(arguments: Sequence[str]) -> int:
    """Runs `export`; returns the exit code. Raises UserError."""
    if not arguments or {"-h", "--help"} & set(arguments):
        return weights.export(arguments)
    options = weights.parse(arguments)
    run = expand(options.run, "RUN")
    to = expand(options.to, "--to")
    if options.force:
        refuse_inputs(to, run, options.words, {})
    if to.suffix in weights.OF_GRAPHS:
        from hvdtrain.extras.export.graph_file import export_graph

        return export_graph(options)
    if _is_for_transformers(run, to, options.words):
        from hvdtrain.extras.export.folder import export_folder

        return export_folder(
            run, to, options.checkpoint, options.words, options.adapters, options.force
        )
    if to.suffix != ".keras":
        return weights.export(arguments)
    weights.check_target(to, options.force)
    return _export_keras(run, to, options.checkpoint, options.words)


def _is_for_transformers(run: Path, to: Path, words: Sequence[str]) -> bool:
    """Whether a folder for from_pretrained() is asked for: the name of no file, and a run, or an
    argument, with model.name=transformers:FOLDER."""
    names = [word.partition("=")[2] for word in words if word.startswith("model.name=")]
    with contextlib.suppress(UserError):
        names += [str(one.value) for one in read_run_config(run) if one.key == "model.name"]
    is_file = to.suffix in (".safetensors", ".pt", ".keras")
    return not is_file and any(name.startswith("transformers:") for name in names)


def _export_keras(run: Path, to: Path, which: str, words: Sequence[str]) -> int:
    """Writes the Keras file; returns the exit code. words: model.name=package.module:function,
    which builds the model.

    Raises UserError for a run of another framework, and if the file cannot be written.
    """
    arguments = [f"resume={run}", *words, "batch.per_rank=1", "comm.engine=single"]
    try:
        return on_connected_ranks(
            lambda rank: _write(rank, to, which),
            None,
            arguments,
            read_former_run=read_former_run,
            what="export",
        )
    except RankFailed as failed:
        return failed.code


def _write(rank: ConnectedRank, to: Path, which: str) -> int:
    if rank.config.framework != "keras":
        what = f"the run has framework={rank.config.framework}, which cannot export a Keras file"
        raise UserError(what, "--to", "--to model.safetensors")
    loaded = load_checkpoint(rank, which)
    learner: Any = loaded.learner
    step = loaded.checkpoint.train_state.progress.step
    try:
        with Folder.open(to.parent) as folder, folder.replacing(to.name) as file:
            file.write(learner.model.saved())
    except OSError as error:
        raise UserError(
            f"cannot write {to}: {error.strerror or error}",
            "--to",
            "give a folder that can be written and has room",
        ) from None
    print(
        "\n".join(
            [*loaded.notes, f"{learner.describe()}", f"step {step} of {rank.config.resume} -> {to}"]
        )
    )
    print(f"load it  import keras\n         model = keras.saving.load_model('{to}')")
    return DONE
