"""profile.steps=A:B: a trace of some steps of this rank, written by the framework's profiler."""

from __future__ import annotations

import re
import warnings
from contextlib import AbstractContextManager
from pathlib import Path

from hvdtrain.comm.communicator import Communicator
from hvdtrain.config.schema import Config
from hvdtrain.core.folder import Folder
from hvdtrain.core.progress import Progress
from hvdtrain.errors import UserError
from hvdtrain.events.log import Log
from hvdtrain.frameworks.learner import Learner
from hvdtrain.training.telemetry.gauge import Gauge


def steps_of(config: Config) -> tuple[int, int]:
    """Parses profile.steps=10:15 to (10, 15): the steps done when the trace begins and ends.

    Raises UserError for anything else.
    """
    steps = config.profile.steps or ""
    match = re.fullmatch(r"(\d{1,15}):(\d{1,15})", steps)
    if not match or int(match[1]) >= int(match[2]):
        raise UserError(
            f"profile.steps={steps} is not a range of steps",
            config.where("profile.steps"),
            "profile.steps=10:15 traces the five steps that follow step 10",
        )
    return int(match[1]), int(match[2])


class StepProfiler(Gauge):
    """Traces the steps after step `first` up to step `last` into a folder of the run. If a trace
    fails, a warning is printed and training continues."""

    def __init__(
        self,
        communicator: Communicator,
        learner: Learner,
        log: Log,
        run: Path,
        *,
        first: int,
        last: int,
    ) -> None:
        self._communicator = communicator
        self._learner = learner
        self._log = log
        self._run = run
        self.folder = run / "profile" / f"rank-{communicator.rank:05d}"
        self.first = first
        self.last = last
        self._trace: AbstractContextManager[None] | None = None
        self._over = False

    def before_step(self, p: Progress) -> None:
        """Begins or ends the trace."""
        if self._over:
            return
        if self.first <= p.step < self.last and self._trace is None:
            self._begin()
        if p.step >= self.last:
            self.close(p.step)

    def close(self, step: int) -> None:
        """Writes a trace that has begun; `step` steps are done."""
        trace = self._trace
        self._trace = None
        if trace is None:
            return
        self._over = True
        try:
            trace.__exit__(None, None, None)
        except (OSError, RuntimeError) as error:
            self._give_up(error)
        else:
            self._log.emit("profile", step, files=[str(self.folder)])

    def from_step(self, step: int) -> Gauge:
        return StepProfiler(
            self._communicator,
            self._learner,
            self._log,
            self._run,
            first=self.first,
            last=self.last,
        )

    def _begin(self) -> None:
        try:
            with Folder.make(
                self.folder.parent.parent, self.folder.parent.name, self.folder.name
            ) as folder:
                folder.refuse_links()  # the framework writes by paths
            self._trace = self._learner.profile(self.folder)
            self._trace.__enter__()
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._over = True
        warnings.warn(f"no profile: {error}; training continues without it", stacklevel=2)


def gauge(
    config: Config,
    communicator: Communicator,
    learner: Learner,
    log: Log,
    run: Path | None,
    step: int,
) -> StepProfiler:
    """Returns the profiler of a configuration with profile.steps."""
    first, last = steps_of(config)
    return StepProfiler(communicator, learner, log, run or Path(), first=first, last=last)
