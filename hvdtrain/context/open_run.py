"""OpenRun: the run folder of a script's loop, its log, and the run that it resumes."""

from __future__ import annotations

import contextlib
import weakref
from pathlib import Path
from typing import Any, NamedTuple

from hvdtrain.comm.on_all_ranks import on_rank_0
from hvdtrain.config.schema import Config
from hvdtrain.context.settings import described
from hvdtrain.errors import UserError
from hvdtrain.events.rank_log import rank_log
from hvdtrain.training.checkpoint import files
from hvdtrain.training.checkpoint.resume import former_run
from hvdtrain.training.checkpoint.room import cannot_write
from hvdtrain.training.lost import RankFailure
from hvdtrain.training.run_folder import check_run_folder, open_run_folder, write_config
from hvdtrain.training.run_rank import ConnectedRank
from hvdtrain.training.train_job import open_run_log


class Former(NamedTuple):
    """The state from which surviving ranks continue after a loss."""

    run: Path
    token: str  # token of the run folder's lock
    model: weakref.ref[Any]  # the prepared model
    loss: RankFailure
    began_s: float  # time.perf_counter() when this rank got the error of the loss


class OpenRun:
    """The folder and log that a script's loop keeps open from hvdtrain.init() on."""

    path: Path | None  # path on rank 0; None: nothing is written
    former: Path | None  # the folder to resume from
    notes: list[str]  # lines for the user

    def __init__(
        self,
        rank: ConnectedRank,
        closing: contextlib.ExitStack,
        former_loop: Former | None,
        *,
        shares_lock: bool,
    ) -> None:
        """shares_lock: another rank may take over the lock of the folder. A collective."""
        self._config = rank.config
        self._lock = rank.lock
        communicator = rank.communicator
        self.path, self.former, self.notes = on_rank_0(
            communicator,
            lambda: self._open() if former_loop is None else self._open_same(former_loop),
        )
        # the live display is only for the trainer's loop
        lines = rank.config.replace(log=rank.config.log.replace(display="lines"))
        self.log = open_run_log(lines, communicator, self.path, rank.lock)
        per_rank = rank.config.log.per_rank and self.path is not None
        name = f"rank-{communicator.rank:05d}.log"
        self.files = closing.enter_context(contextlib.ExitStack())
        self.files.enter_context(
            rank_log(Path(self.path or "") / "ranks" / name if per_rank else None)
        )
        self.open_folder = rank.lock.open
        # token of the lock that another rank 0 takes over
        self.token = on_rank_0(communicator, lambda: self._lock.token) if shares_lock else ""

    def _open(self) -> tuple[Path | None, Path | None, list[str]]:
        """On rank 0, returns the locked run folder, the folder to resume from, and lines for the
        user."""
        if self._config.run is None:
            if self._config.resume not in ("auto", "no"):
                raise UserError(
                    "resume= needs run=",
                    self._config.where("resume"),
                    "run=DIR, the folder that this script writes to",
                )
            return None, None, []
        former = former_run(self._config)
        run, notes = open_run_folder(self._config, self._lock)
        check_run_folder(run, 0)
        return run, former, notes

    def _open_same(self, former: Former) -> tuple[Path, Path | None, list[str]]:
        """Returns what _open() does, after a loss; the lost rank may have held the lock."""
        if not self._lock.is_held:
            try:
                self._lock.take_over(former.run, former.token)
            except OSError as error:
                raise cannot_write(error, self._config.where("run")) from None
        check_run_folder(former.run, 0)
        return (
            former.run,
            former.run if files.finished(former.run) else former_run(self._config),
            [],
        )

    @property
    def is_new(self) -> bool:
        """Whether the run folder was empty before."""
        return self.path is not None and (
            self.former is None or self.former.resolve() != self.path.resolve()
        )

    def need(self, where: str) -> Path:
        """Returns the run folder. Raises UserError if the loop has none."""
        if self.path is None:
            raise UserError("there is no run folder", where, "hvdtrain.init({'run': 'DIR'})")
        return self.path

    def write_config(self, config: Config) -> None:
        """Writes config.yaml on rank 0. Raises OSError."""
        assert self.path is not None
        write_config(config, self.path, self._lock, described())

    def write_first_files(self, config: Config) -> None:
        """Writes the first files of the run folder. Raises UserError, as on a full disk."""
        try:
            self.write_config(config)
        except OSError as error:
            raise cannot_write(error, self._config.where("run")) from None
