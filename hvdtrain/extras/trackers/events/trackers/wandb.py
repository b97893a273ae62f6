"""Weights & Biases: the configuration and the numbers of each event; online if a login exists, else
in RUN/wandb."""

from __future__ import annotations

import contextlib
import netrc
import os
import shlex
import sys
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from hvdtrain.config.schema import Config
from hvdtrain.core.folder import Folder
from hvdtrain.errors import BUG, DONE, REQUEUE, UserError
from hvdtrain.events.log import Event
from hvdtrain.extras.trackers.tracker_data import (
    METRICS,
    load_run_id,
    metric_names,
    redacted_config,
    require_package,
    save_run_id,
    scalars,
)

if TYPE_CHECKING:
    from wandb import Run

CODES = {"end": DONE, "stop": REQUEUE}
_HOST = "https://api.wandb.ai"


def check_installed() -> None:
    """Raises UserError if wandb is not installed, or if WANDB_MODE=online has no login."""
    require_package("wandb", "wandb")
    mode(os.environ)


def build(config: Config, run: Path) -> Wandb:
    """Builds a tracker. WANDB_MODE selects online or offline; by default it is online if
    WANDB_API_KEY or a login in ~/.netrc exists.

    wandb reads WANDB_PROJECT, WANDB_NAME, WANDB_ENTITY, WANDB_BASE_URL and its other variables.
    Upload an offline run with: wandb sync RUN/wandb/offline-run-*. wandb receives numbers, the
    configuration and the host's name, and measures the host; it receives no console output, code,
    git state, command line or list of packages. If the uploads of an online run hang, wandb's
    cleanup delays the end of the process; RUN/wandb can be uploaded later with wandb sync.

    Raises UserError if wandb is not installed, or WANDB_MODE=online has no login; wandb is
    imported at the first event.
    """
    check_installed()
    return Wandb(config, run.resolve(), mode(os.environ))


def mode(environment: Mapping[str, str]) -> str:
    """Returns the mode: online, offline or disabled. Raises UserError if wandb would ask for a key
    at the terminal."""
    requested = environment.get("WANDB_MODE")
    logged_in = _logged_in(environment)
    if requested == "online" and not logged_in:
        what = (
            f"WANDB_MODE=online, but there is no key for {environment.get('WANDB_BASE_URL', _HOST)}"
        )
        raise UserError(
            what,
            "log.trackers",
            "run wandb login or set WANDB_API_KEY; WANDB_MODE=offline keeps the run in its folder",
        )
    return requested or ("online" if logged_in else "offline")


def _logged_in(environment: Mapping[str, str]) -> bool:
    if environment.get("WANDB_API_KEY") or environment.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(environment.get("WANDB_BASE_URL", _HOST)).netloc
    try:
        return (
            netrc.netrc(Path(environment.get("NETRC", "~/.netrc")).expanduser()).authenticators(
                host
            )
            is not None
        )
    except (OSError, RuntimeError, netrc.NetrcParseError):
        return False


class Wandb:
    """One W&B run for a job, however often it is resumed. The x axis of all curves is "step", not
    wandb's own count.

    wandb drops values that are logged for an earlier step of its own count, as in a resumed job.
    With "step", repeated steps of a resumed job have two values.
    """

    def __init__(self, config: Config, run: Path, mode: str) -> None:
        self._metrics = METRICS
        self._config = config
        self._folder = run
        self._mode = mode
        self._run: Run | None = None
        self._code = BUG  # until the job says how it ended

    def __call__(self, event: Event) -> None:
        if self._run is None:
            self._run = self._open(event)
        self._metrics = metric_names(event, self._metrics)
        numbers = scalars(event, self._metrics)
        if numbers:
            self._run.log({**numbers, "step": event.step})
        self._code = CODES.get(event.kind, event.fields.get("exit_code", self._code))

    def close(self) -> None:
        if self._run is not None:
            if self._code == REQUEUE:
                self._run.mark_preempting()
            folder = Path(self._run.settings.sync_dir)
            self._run.finish(exit_code=self._code)
            if self._mode == "offline":
                print(
                    f"wandb    kept offline; to send it: wandb sync {shlex.quote(str(folder))}",
                    flush=True,
                )

    def _open(self, first: Event) -> Run:
        # read at the import; otherwise wandb reports its failures to its vendor
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        # a setting in init() would be too late for login messages
        os.environ.setdefault("WANDB_SILENT", "true")
        with _restore_exit_hooks():
            import wandb

            with Folder.make(self._folder, "wandb") as folder:
                # it contains earlier starts, which are only read, with links to the cache
                folder.refuse_links(below=False)
            path = self._folder / "wandb_run.json"
            run_id = load_run_id(path, first) or uuid.uuid4().hex[:8]
            run = wandb.init(
                project=os.environ.get("WANDB_PROJECT") or "hvdtrain",
                name=os.environ.get("WANDB_NAME") or self._folder.name,
                id=run_id,
                resume="allow",
                dir=self._folder,
                config=redacted_config(self._config),
                settings=wandb.Settings(
                    mode=self._mode,  # type: ignore[arg-type]  # a value of the environment, which Settings checks
                    console="off",
                    reinit="create_new",  # does not affect runs of user code
                    disable_code=True,
                    save_code=False,
                    disable_git=True,
                    x_disable_meta=True,
                    x_save_requirements=False,
                ),
            )
        run.define_metric("*", step_metric="step")
        save_run_id(path, run_id)
        return run


@contextlib.contextmanager
def _restore_exit_hooks() -> Iterator[None]:
    """Restores sys.exit and sys.excepthook, which wandb replaces to learn the exit code; close()
    passes it on."""
    before = sys.exit, sys.excepthook
    try:
        yield
    finally:
        sys.exit, sys.excepthook = before
