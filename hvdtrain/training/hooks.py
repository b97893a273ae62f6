"""Hooks: user callbacks in the trainer's loop, with state in the checkpoint, values in the log, and
stops that all ranks agree on."""

from __future__ import annotations

import inspect
import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.comm.communicator import Communicator
from hvdtrain.config.plugins import load_dotted, of_python
from hvdtrain.config.schema import Config
from hvdtrain.config.sections.section import is_object
from hvdtrain.core.arrays import Arrays
from hvdtrain.core.metrics import Sums, host_value, scalar
from hvdtrain.core.progress import Progress
from hvdtrain.errors import UserError, short
from hvdtrain.frameworks.learner import Learner
from hvdtrain.tasks.task import Task
from hvdtrain.training.progress.train_state import TrainState

MOST_STATE_BYTES = 2**20  # limit for the state of all hooks, as JSON
_FIX_STATE = (
    "numbers, texts, lists, and dicts with texts as keys: list(values), {str(key): value}, and "
    "convert back in load_state_dict()"
)
_FIX = "a subclass of hvdtrain.Hook: an object of it, or its class as hooks=[package.module:Class]"


class Hook:
    """Base class of user callbacks in the loop of hvdtrain.train(). Methods do nothing unless a
    subclass overrides them.

    They are called on every rank, in the order in which hooks are listed; a hook with
    `on_rank_0_only` is called only on rank 0. A hook may change state that ranks share only if it
    makes the same change on every rank. An exception ends the job on all ranks.
    """

    on_rank_0_only = False
    is_listed = True  # in the header

    def on_start(self, training: Training) -> None:
        """Called before the first step of this start, which may be a resume; the state has been
        loaded."""

    def after_step(self, training: Training) -> None:
        """Called after each step. Steps are queued on a GPU: reading training.loss waits for it,
        which costs time in every step."""

    def after_evaluation(self, training: Training, metrics: Mapping[str, float]) -> None:
        """Called after each evaluation. metrics: of the validation set by name, equal on all
        ranks."""

    def before_checkpoint(self, training: Training) -> None:
        """Called before the state is saved in a checkpoint."""

    def on_end(self, training: Training) -> None:
        """Called after the last step of this start, before the last checkpoint: the job is
        complete, or stops to be resumed."""

    def state_dict(self) -> Any:
        """Returns the state to save in checkpoints: a JSON tree without NaN, whose keys are
        strings. Rank 0's is saved, and every rank loads it.

        It is also called after the first step, to report values that a checkpoint would change.
        """

    def load_state_dict(self, state: Any) -> None:
        """Loads what state_dict() returned; not called if that was None."""


class Training:
    """A hook's view of the job on this rank."""

    def __init__(
        self,
        config: Config,
        communicator: Communicator,
        learner: Learner,
        run: Path | None,
        task: Task,
    ) -> None:
        self._communicator = communicator
        self._learner = learner
        self._taken = trainers_names(task)
        self._metric = next(metric for metric in task.metrics if metric.name == "loss")
        # the configuration, and the run folder as rank 0 knows it
        self.config = config
        self.run = run
        # done
        self.step = 0
        self.epochs = 0.0
        self.called = ""  # the hook being called
        self.is_on_one_rank = False  # no other rank calls that hook
        self.request = ""  # to stop, and why
        self.is_over = False  # no event follows
        self._sums: Sums = {}
        self._logged: dict[
            str, tuple[Any, int]
        ] = {}  # name -> (values added up, maybe on the device; how many)

    @property
    def rank(self) -> int:
        return self._communicator.rank

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self._communicator.size

    @property
    def model(self) -> Any:
        """The torch.nn.Module or keras.Model being trained; None if the framework's models are
        functions."""
        return self._learner.module

    @property
    def loss(self) -> float:
        """This rank's loss in the last step, a mean over its samples, tokens or pixels; NaN without
        any. The host waits for the device."""
        if not self._sums.get("count"):
            return math.nan
        return self._metric.of({name: host_value(value) for name, value in self._sums.items()})

    def allgather(self, value: Any) -> list[Any]:
        """Returns this value of every rank: numbers, texts, lists and dicts. A collective, so only
        for hooks that run on every rank."""
        self._check_all_ranks("allgather", "all ranks give a value together")
        return self._communicator.allgather_object(value)

    def weights(self) -> Arrays:
        """Returns weights and buffers by name in the model's state dict. A collective, so only for
        hooks that run on every rank."""
        self._check_all_ranks("weights", "all ranks gather the weights together")
        state = self._learner.state()
        return {name: state[own] for name, own in self._learner.state_dict_names().items()}

    def _check_all_ranks(self, call: str, why: str) -> None:
        if self.is_on_one_rank:
            raise UserError(
                f"training.{call}() was called in a hook that runs only on rank 0",
                self.called,
                f"set on_rank_0_only = False: {why}",
            )

    def log(self, **values: Any) -> None:
        """Logs values: their means over ranks and calls appear in the next event `step`, or in the
        event `epoch` from after_evaluation()."""
        self._check_goes_on("log")
        for name, value in values.items():
            if name in self._taken:
                raise UserError(
                    f"training.log({name}=...): {name} is a name that the trainer uses",
                    self.called,
                    f"another name: my_{name}",
                )
            total, count = self._logged.get(name, (0.0, 0))
            self._logged[name] = (total + scalar(name, value, self.called), count + 1)

    def stop(self, reason: str) -> None:
        """Ends the job on all ranks at the next sync point (log.every_steps), as after its last
        step: with an evaluation and exit code 0."""
        self._check_goes_on("stop")
        self.request = f"hook {self.called}: {short(str(reason), 200)}"

    def _check_goes_on(self, call: str) -> None:
        if self.is_over:
            raise UserError(
                f"training.{call}() in on_end(): training is over",
                self.called,
                "use after_evaluation(), which runs earlier",
            )

    def at(self, p: Progress, sums: Sums | None = None) -> None:
        """Sets the position. p: the steps done; sums: of the last step, if there was a new one."""
        self.step = p.step
        self.epochs = p.epochs
        self._sums = self._sums if sums is None else sums

    def forget(self) -> None:
        """Drops what was logged and requested in steps that will be repeated."""
        self._logged = {}
        self.request = ""

    def take_logged(self) -> dict[str, tuple[float, int]]:
        """Returns name -> (sum of values, their number) since the last call. The host waits for the
        device."""
        logged = self._logged
        self._logged = {}
        return {name: (float(total), count) for name, (total, count) in logged.items()}


def trainers_names(task: Task) -> set[str]:
    """Names that hooks cannot log: the trainer's fields of events, which trackers show beside a
    hook's."""
    return {
        *(metric.name for metric in task.metrics),
        "lr",
        "batch",
        "epochs",
        *(f"{device}{unit}_per_s" for device in ("", "device_") for unit in ("samples", "tokens")),
        *("device_tflops", "mfu", "gpu_percent"),
    }


class Hooks:
    """The hooks of a job on this rank."""

    def __init__(
        self, hooks: Sequence[Hook], training: Training, communicator: Communicator
    ) -> None:
        self._hooks = hooks
        self._training = training
        self._communicator = communicator
        counts: Counter[str] = Counter()
        self._names: list[str] = []  # names of their states: Log, and Log 2 for a second one
        for hook in hooks:
            counts[name := type(hook).__name__] += 1
            self._names.append(name if counts[name] == 1 else f"{name} {counts[name]}")
        self._means: dict[str, float] = {}
        self._ended_by = ""  # why a hook has ended the job; the same on every rank
        self._are_states_checked = False
        # (steps, steps at the last evaluation) of the last checkpoint that hooks were called for
        self._told = (
            -1,
            -1,
        )

    def summary(self) -> list[str]:
        """Returns a line for the header, if there are hooks."""
        of = [
            name + " (rank 0)" * hook.on_rank_0_only
            for name, hook in zip(self._names, self._hooks, strict=True)
            if hook.is_listed
        ]
        return [f"hooks   {', '.join(of)}"] if of else []

    def load(self, now: TrainState) -> list[str]:
        """Loads each hook's state; returns lines about states in the checkpoint that no hook
        loads."""
        self._training.forget()
        for name, hook in zip(self._names, self._hooks, strict=True):
            if now.hooks.get(name) is not None:
                self._begin(name, hook)
                hook.load_state_dict(now.hooks[name])
        left = [
            name
            for name, state in now.hooks.items()
            if state is not None and name not in self._names
        ]
        return [
            f"the checkpoint contains state for hook {name}, which this job does not define"
            for name in left
        ]

    def start(self, now: TrainState) -> None:
        self._training.at(now.progress)
        self._each(lambda hook: hook.on_start(self._training))

    def after_step(self, p: Progress, sums: Sums) -> None:
        """Calls after_step() of the hooks. p: after the step; sums: of the step."""
        if self._hooks:
            self._training.at(p, sums)
            self._each(lambda hook: hook.after_step(self._training))
            if not self._are_states_checked:
                self._states()
                self._are_states_checked = True

    def after_evaluation(self, now: TrainState, metrics: Mapping[str, float]) -> TrainState:
        """Calls after_evaluation() of the hooks; returns the state, marked as complete if a hook
        asks for that. A collective if there are hooks."""
        self._training.at(now.progress)
        self._each(lambda hook: hook.after_evaluation(self._training, metrics))
        self.exchange()
        return self.ended(now)

    def exchange(self) -> None:
        """Sums logged values over ranks, and agrees whether to stop. A collective if there are
        hooks."""
        if not self._hooks:
            return
        of_ranks = self._communicator.allgather_object(
            (self._training.take_logged(), self._training.request)
        )
        sums: dict[str, tuple[float, int]] = {}
        for logged, _ in of_ranks:
            for name, (total, count) in logged.items():
                before = sums.get(name, (0.0, 0))
                sums[name] = (before[0] + total, before[1] + count)
        self._means = {name: total / count for name, (total, count) in sorted(sums.items())}
        self._ended_by = next((request for _, request in of_ranks if request), "")

    def ended(self, now: TrainState) -> TrainState:
        """Returns the state with the job marked as complete, if a hook on any rank asked for
        that."""
        return (
            replace(now, progress=now.progress.end_here(), ended_by=self._ended_by)
            if self._ended_by
            else now
        )

    def fields(self) -> dict[str, Any]:
        """Returns the event field with logged values."""
        means = self._means
        self._means = {}
        return {"logged": means} if means else {}

    def with_states(self, now: TrainState, *, before_checkpoint: bool) -> TrainState:
        """Returns the state with the hooks' states, as a checkpoint stores them."""
        if not self._hooks:
            return now
        at = (now.progress.step, now.evaluated)
        if before_checkpoint and at != self._told:
            self._told = at
            self._each(lambda hook: hook.before_checkpoint(self._training))
        return replace(now, hooks=self._states())

    def _states(self) -> dict[str, Any]:
        states: dict[str, Any] = {}
        for name, hook in zip(self._names, self._hooks, strict=True):
            state = hook.state_dict()
            try:
                text = json.dumps(state, allow_nan=False)
                same = json.loads(text)
            except (TypeError, ValueError, RecursionError) as error:
                what = f"state_dict() of hook {name} returned something that is not JSON: {error}"
                raise UserError(what, name, f"{_FIX_STATE}; None instead of NaN") from None
            if change := _changed_by_json(state, same, "state"):
                raise UserError(
                    f"state_dict() of hook {name} would change on a resume: {change}",
                    name,
                    _FIX_STATE,
                )
            if len(text) > MOST_STATE_BYTES:
                raise UserError(
                    f"state_dict() of hook {name} has {len(text):,} bytes",
                    name,
                    f"at most {MOST_STATE_BYTES:,}",
                )
            states[name] = same
        return states

    def end(self, now: TrainState) -> TrainState:
        """Calls on_end() of the hooks; returns the state for the last checkpoint."""
        self._training.is_over = True
        self._each(lambda hook: hook.on_end(self._training))
        return self.with_states(now, before_checkpoint=True)

    def _each(self, call: Callable[[Hook], None]) -> None:
        for name, hook in zip(self._names, self._hooks, strict=True):
            if not hook.on_rank_0_only or self._communicator.rank == 0:
                self._begin(name, hook)
                call(hook)

    def _begin(self, name: str, hook: Hook) -> None:
        self._training.called = name
        self._training.is_on_one_rank = hook.on_rank_0_only and self._communicator.size > 1


def _changed_by_json(state: Any, same: Any, path: str) -> str:
    """Returns the first value that JSON changes; empty if nothing changes. A NumPy float is a
    float."""
    if isinstance(state, np.float64):
        return ""
    if type(state) is not type(same):
        return f"{path} is a {type(state).__name__}, and would be a {type(same).__name__}"
    if isinstance(state, dict):
        others = [key for key in state if type(key) is not str]
        if others:
            return f"{path} has the key {others[0]!r:.40}, and would have a text in its place"
        inner = [(state[key], same[key], f"{path}[{key!r:.40}]") for key in state]
    elif isinstance(state, list):
        inner = [
            (one, two, f"{path}[{index}]")
            for index, (one, two) in enumerate(zip(state, same, strict=True))
        ]
    else:
        return ""
    return next(filter(None, (_changed_by_json(*each) for each in inner)), "")


def hooks_of(config: Config) -> list[Hook]:
    """Returns the hooks of `hooks=`, then the script's. Raises UserError for anything else."""
    found = [_made(name, config.where("hooks")) for name in config.hooks if not is_object(name)]
    return [*found, *check_hooks(config.given_hooks)]


def _made(name: str, where: str) -> Hook:
    """Creates a hook from package.module:Class."""
    if of_python(name):
        raise UserError(f"{short(name)} is part of Python itself, not a hook", where, _FIX)
    kind = load_dotted(name, where)
    try:
        inspect.signature(kind).bind()
    except TypeError as error:
        what = f"{short(name)} cannot be called without arguments: {error}"
        raise UserError(what, where, "hvdtrain.train(hooks=[...]) with an object") from None
    made = kind()
    if not isinstance(made, Hook):
        raise UserError(f"{short(name)} returns a {type(made).__name__}, not a hook", where, _FIX)
    return made


def check_hooks(hooks: Any) -> list[Hook]:
    """Checks the hooks that a script passes. Raises UserError for anything else."""
    where = "hvdtrain.train(), hooks"
    if not isinstance(hooks, Sequence) or isinstance(hooks, str):
        raise UserError(f"hooks is a {type(hooks).__name__}", where, "a list of them")
    for hook in hooks:
        if not isinstance(hook, Hook):
            raise UserError(f"{short(repr(hook))} is not a hook", where, _FIX)
    return list(hooks)
