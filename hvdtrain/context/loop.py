"""ScriptLoop: the state that a Context's methods share: ranks, prepared objects, and the loop's
position."""

from __future__ import annotations

import contextlib
import socket
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hvdtrain.comm.communicator import Elastic
from hvdtrain.comm.mesh import make_mesh
from hvdtrain.context import loop_events
from hvdtrain.context.open_run import Former, OpenRun
from hvdtrain.context.saved import IDENTITY, WithExtra
from hvdtrain.context.stream import SampleOrder, SampleStream
from hvdtrain.context.sync_points import SyncPoints
from hvdtrain.core.extras import implementation, load
from hvdtrain.core.progress import Progress
from hvdtrain.errors import DONE, UserError
from hvdtrain.frameworks.extra import MOST_BYTES
from hvdtrain.frameworks.user_loop import Words, user_loop_of
from hvdtrain.training.checkpoint.checkpoints import Checkpoints
from hvdtrain.training.checkpoint.saver import Saver
from hvdtrain.training.job import make_health, make_saver
from hvdtrain.training.progress.train_state import TrainState
from hvdtrain.training.replicas.broadcast import broadcast_state
from hvdtrain.training.run_folder import record_environment
from hvdtrain.training.run_rank import ConnectedRank

_SPARE_BYTES = 2**20  # bytes of a checkpoint's file besides arrays


class ScriptLoop:
    """The shared state of a Context and its parts, one on each rank."""

    points: SyncPoints  # set when is_open
    saved: WithExtra
    limit_bytes: int  # limit for a checkpoint's file

    def __init__(
        self,
        rank: ConnectedRank,
        closing: contextlib.ExitStack,
        ranks: Elastic | None,
        former: Former | None,
    ) -> None:
        """Takes the arguments of Context. A collective."""
        self.ranks = ranks
        self._former = former
        self.framework = user_loop_of(rank.config.framework)
        self.framework.begin(rank.config, rank.communicator)
        # until the loop has begun, with an event
        self.untold_loss = None if former is None else former.loss
        self.config = rank.config
        self.communicator = rank.communicator
        self.heartbeat = rank.heartbeat
        self._signals = rank.signals
        self._reason = rank.engine_reason
        self._rank_notes = rank.notes
        self.mesh = make_mesh(rank.communicator, rank.config)
        self.hosts: list[str] = rank.communicator.allgather_object(socket.gethostname())
        self.run = OpenRun(rank, closing, former, shares_lock=ranks is not None)
        self.learner: Any = None
        # the model that was prepared last, if any
        self.model: weakref.ref[Any] = weakref.ref(self) if former is None else former.model
        # order of the samples, from the checkpoint or samples()
        self.order: SampleOrder | None = None
        self.stream: SampleStream | None = None
        self.is_resumed = False
        self._names: list[str] = []  # of the models, if they have names
        self.is_open = False  # the models are prepared, and there are `points`
        self.is_closed = False

    @property
    def words(self) -> Words:
        return self.framework.words

    @property
    def step(self) -> int:
        """Steps done."""
        return self.points.now.progress.step if self.is_open else 0

    @property
    def epochs(self) -> float:
        """Epochs of the samples done, with the fraction."""
        return self.points.now.progress.epochs if self.is_open else 0.0

    def need(self, where: str) -> None:
        """Raises UserError if the method `where` is called before prepare() or after close()."""
        if self.is_closed:
            raise UserError("the context is closed", where, "ctx = hvdtrain.init(...) again")
        if self.learner is None:
            raise UserError("no model was prepared", where, f"{self.words.prepare} before")
        if not self.is_open:
            self._open()

    def prepare(
        self,
        model: Any,
        optimizer: Any,
        example: Any,
        name: str | None,
        on_step: Callable[[], None],
    ) -> Any:
        """Implements Context.prepare(). on_step: called after each step."""
        self._check_may_prepare(model, name)
        self.heartbeat.beat("preparing the model", 0, 0)
        if name is None:
            learner = self.learner = self.framework.learner(
                self.config, self.mesh, model, optimizer, on_step, example
            )
        else:
            models = self.learner
            if models is None:
                module = module_of_several_models()
                models = module.models_in_turn(self.config, self.mesh, self.words, on_step)
            learner = models.add(name, model, optimizer)
            self.learner = models
        self.heartbeat.under_way = self.learner.under_way
        broadcast_state(self.communicator, learner, None)
        self.model = weakref.ref(learner.user_model)
        if name is None:
            self._open()
        else:
            self._names.append(name)
        return learner.prepared

    def _check_may_prepare(self, model: Any, name: str | None) -> None:
        """Raises UserError for one more model where that is not possible, and for one that was
        prepared before a rank was lost."""
        if self.is_open and self._names:
            raise UserError(
                "ctx.prepare() was called after the loop has begun",
                "ctx.prepare()",
                f"call it before {self.words.resume} and ctx.samples()",
            )
        if self.learner is not None and (name is None or not self._names):
            raise UserError("ctx.prepare() was called twice", "ctx.prepare()", self.words.one)
        former = self.model() if self.learner is None else None
        if former is not None and any(
            former is one for one in (model, getattr(model, "_orig_mod", None))
        ):
            what = "the model was prepared before a rank was lost"
            raise UserError(
                what,
                "ctx.prepare()",
                "create the model and the optimizer inside the function that hvdtrain.run() calls",
            )

    def _open(self) -> None:
        """Makes what saves, watches and synchronizes the prepared models."""
        learner = self.learner
        self.saved = WithExtra(learner)
        self.limit_bytes = (
            _SPARE_BYTES + MOST_BYTES + 8 * sum(piece.nbytes for piece in learner.pieces())
        )
        beginning = TrainState(Progress(1, 1), sums={"loss": 0.0, "count": 0})
        checkpoints = Checkpoints(
            self.communicator,
            self.saved,
            self.run.path or Path(),
            self.limit_bytes,
            self._saver(beginning),
            self.hosts,
            self.heartbeat.go_on,
        )
        health = make_health(
            self.config, self.communicator, self._signals, self.heartbeat, checkpoints, self.hosts
        )
        health.fix = "a lower learning rate, a warm-up or optim.clip_norm; or guard.nonfinite=skip"
        self.points = SyncPoints(
            self.config,
            self.communicator,
            learner,
            health,
            self.heartbeat,
            self.run.log,
            beginning,
            self.ranks,
        )
        self.is_open = True

    def _saver(self, beginning: TrainState) -> Saver | None:
        """Creates the writer of checkpoints, on rank 0 only."""
        run = self.run
        if run.path is None or self.communicator.rank != 0:
            return None
        # in a new run, samples() has already written it
        record = None if run.is_new else self._write_config
        return make_saver(
            self.config,
            IDENTITY,
            run.log,
            beginning,
            run.path,
            self.limit_bytes,
            record,
            run.open_folder,
        )

    def _write_config(self) -> None:
        assert self.stream is not None
        self.run.write_config(self.stream.config)

    @property
    def should_stop(self) -> bool:
        """Implements Context.should_stop. A collective."""
        self.need("ctx.should_stop")
        if self.stream is not None and self.learner.has_stepped:
            self.points.sync()
        return bool(self.points.health.stop_request)

    @property
    def why_over(self) -> str:
        """Why the loop has ended or stops."""
        over = (
            "its samples are over" if self.points.now.progress.done else "the script left its loop"
        )
        return self.points.health.stop_request or over

    @property
    def code(self) -> int:
        """The exit code: the stop's, or DONE."""
        return (
            self.points.health.stop_code
            if self.is_open and self.points.health.stop_request
            else DONE
        )

    def record_environment(self) -> dict[str, Any]:
        """Writes environment.json on rank 0, and returns its fields; empty elsewhere."""
        if self.communicator.rank or self.run.path is None:
            return {}
        return record_environment(self.run.path)

    def emit_start(self, stream: SampleStream, environment: Mapping[str, Any]) -> None:
        """Emits the event "start", and "lost" if the loop continues after a loss."""
        fields = loop_events.start_fields(
            self.communicator, self.hosts, self.learner.describe(), stream
        )
        notes = [*self._rank_notes, *self.run.notes, *getattr(self.communicator, "notes", ())]
        lines = loop_events.header(
            fields, self._reason, stream, self.run.path, self.points.now, notes
        )
        self.run.log.emit(
            "start",
            self.step,
            lines=lines,
            **fields,
            environment=environment,
            seconds=round(self.points.now.seconds, 3),
            run=f"{self.run.path}",
        )
        if self.untold_loss is not None and self._former is not None:
            go_on_s = time.perf_counter() - self._former.began_s
            loss = self.untold_loss._replace(go_on_s=go_on_s)
            loop_events.emit_loss(self.run.log, loss, self.points.now, self.communicator.size)
            self.untold_loss = None


def module_of_several_models() -> Any:
    """Returns the module of an extra for ctx.prepare(..., name=). Raises UserError if there is
    none."""
    module = implementation("ctx.prepare(name=)")
    return load(module, "trains several models in turn", "name=", "ctx.prepare(..., name=)")
