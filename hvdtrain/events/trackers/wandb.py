"""Weights & Biases: the configuration and the numbers of each event, online where somebody is logged in, else in RUN/wandb."""

from __future__ import annotations

import contextlib
import netrc
import os
import sys
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from hvdtrain.config.schema import Config
from hvdtrain.errors import BUG, DONE, REQUEUE, UserError
from hvdtrain.events.log import Event
from hvdtrain.events.scalars import scalars
from hvdtrain.events.trackers.run_id import former, keep
from hvdtrain.events.trackers.settings import demand, settings

if TYPE_CHECKING:
    from wandb import Run

CODES = {"end": DONE, "stop": REQUEUE}
_HOST = "https://api.wandb.ai"


def build(config: Config, run: Path) -> Wandb:
    """WANDB_MODE decides; else it is online where WANDB_API_KEY is set or `wandb login` was done (~/.netrc), and offline elsewhere.

    WANDB_PROJECT, WANDB_NAME, WANDB_ENTITY, WANDB_BASE_URL and the like are heard. Upload an offline run with: wandb sync
    RUN/wandb/offline-run-*. It is given numbers, the configuration and the host's name, and measures the host itself; no console, code,
    git state, command line or list of packages. Nothing is imported before the first event. An online run whose uploads hang holds up
    the usual end of the process, in wandb's own last clean-up: what is in RUN/wandb can be uploaded with wandb sync later.
    """
    demand("wandb", "wandb")
    return Wandb(config, run.resolve(), mode(os.environ))


def mode(environment: Mapping[str, str]) -> str:
    """online, offline or disabled; a UserError where wandb would ask at the terminal for a key."""
    asked, known = environment.get("WANDB_MODE"), _logged_in(environment)
    if asked == "online" and not known:
        what = f"WANDB_MODE=online, but there is no key for {environment.get('WANDB_BASE_URL', _HOST)}"
        raise UserError(what, "log.trackers", "wandb login, or set WANDB_API_KEY; WANDB_MODE=offline keeps the run in its folder")
    return asked or ("online" if known else "offline")


def _logged_in(environment: Mapping[str, str]) -> bool:
    if environment.get("WANDB_API_KEY") or environment.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(environment.get("WANDB_BASE_URL", _HOST)).netloc
    try:
        return netrc.netrc(Path(environment.get("NETRC", "~/.netrc")).expanduser()).authenticators(host) is not None
    except (OSError, RuntimeError, netrc.NetrcParseError):
        return False


class Wandb:
    """One W&B run for a job, however often it is resumed. The x of all curves is the number "step": wandb's own count drops what is
    logged for an earlier step, as a resumed job does. So steps that are done twice have two values.
    """

    def __init__(self, config: Config, run: Path, mode: str) -> None:
        self._config, self._folder, self._mode = config, run, mode
        self._run: Run | None = None
        self._code = BUG  # until the job says how it ended

    def __call__(self, event: Event) -> None:
        if self._run is None:
            self._run = self._open(event)
        numbers = scalars(event)
        if numbers:
            self._run.log({**numbers, "step": event.step})
        self._code = CODES.get(event.kind, event.fields.get("exit_code", self._code))

    def close(self) -> None:
        if self._run is not None:
            if self._code == REQUEUE:
                self._run.mark_preempting()
            self._run.finish(exit_code=self._code)

    def _open(self, first: Event) -> Run:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # read at the import: it would tell wandb's makers of its own failures
        os.environ.setdefault("WANDB_SILENT", "true")  # as a setting of init() it comes too late for what a login says
        with _own_exit():
            import wandb

            path = self._folder / "wandb_run.json"
            run_id = former(path, first) or uuid.uuid4().hex[:8]
            run = wandb.init(
                project=os.environ.get("WANDB_PROJECT") or "hvdtrain",
                name=os.environ.get("WANDB_NAME") or self._folder.name,
                id=run_id,
                resume="allow",
                dir=self._folder,
                config=settings(self._config),
                settings=wandb.Settings(
                    mode=self._mode,  # type: ignore[arg-type]  # a text of the environment, which Settings checks
                    console="off",
                    reinit="create_new",  # leaves runs of the user's own code alone
                    disable_code=True,
                    save_code=False,
                    disable_git=True,
                    x_disable_meta=True,
                    x_save_requirements=False,
                ),
            )
        run.define_metric("*", step_metric="step")
        keep(path, run_id)
        return run


@contextlib.contextmanager
def _own_exit() -> Iterator[None]:
    """Puts sys.exit and sys.excepthook back, which wandb replaces to learn the exit code that close() tells it."""
    before = sys.exit, sys.excepthook
    try:
        yield
    finally:
        sys.exit, sys.excepthook = before
