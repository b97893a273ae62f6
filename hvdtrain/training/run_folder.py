"""The run folder, where rank 0 writes: a new one, or that of the run to resume."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from hvdtrain.config.read import to_yaml
from hvdtrain.config.schema import Config
from hvdtrain.errors import UserError
from hvdtrain.training.checkpoint import files


def make_run_folder(config: Config, resumed: Path | None = None) -> Path:
    """Makes the folder, or returns the one of the resumed run. Raises UserError where it holds another run, or cannot be written."""
    try:
        if config.run is not None:
            run = Path(config.run).expanduser()
            if config.resume != "auto" and _holds_a_run(run) and (resumed is None or resumed.resolve() != run.resolve()):
                fix = f"resume=auto or resume={run} resumes it; or give another run="
                raise UserError(f"{run} holds another run", config.where("run"), fix)
            run.mkdir(parents=True, exist_ok=True)
            return run
        return resumed or _new_folder(config)
    except OSError as error:
        raise UserError(f"cannot write the run folder: {error}", config.where("run"), "give run= a folder that can be written") from None


def write_config(config: Config, run: Path, *, resumed: bool) -> str:
    """Writes config.yaml, whole or not at all; returns a line for the user where it cannot and the job goes on with its former one.

    Raises UserError where a new job cannot write it, as on a full disk.
    """
    unfinished = run / ".config.yaml.unfinished"
    try:
        unfinished.write_text(to_yaml(config), encoding="utf-8")
        files.sync(unfinished)
        unfinished.replace(run / "config.yaml")
    except OSError as error:
        what = f"cannot write config.yaml: {error.strerror or error}"
        if not resumed:
            raise UserError(what, str(run), "give run= a folder that can be written, with room") from None
        return what
    return ""


def _holds_a_run(run: Path) -> bool:
    return any((run / name).exists() for name in ("config.yaml", "events.jsonl", "checkpoints"))


def _new_folder(config: Config) -> Path:
    """runs/DATA-MODEL-TIME, or with a number behind it where another job began in the same second."""
    name = f"{config.data.name}-{config.model.name.split(':')[-1]}-{time.strftime('%Y%m%d-%H%M%S')}"
    for suffix in ("", *(f"-{number}" for number in range(2, 1000))):
        with contextlib.suppress(FileExistsError):
            run = Path("runs") / f"{name}{suffix}"
            run.mkdir(parents=True)
            return run
    raise FileExistsError(f"runs/{name} and 998 more")
