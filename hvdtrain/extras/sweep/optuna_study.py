"""Optuna's proposals: each trial is based on the results of earlier trials; poor trials are stopped
by their evaluations."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from hvdtrain.errors import UserError
from hvdtrain.extras.sweep.space import SEED, Choice, Point, Range, Space
from hvdtrain.extras.sweep.trials import KEPT, Result, Trial


def check_space(space: Space) -> None:
    """Raises UserError if Optuna is missing, or would choose the luckiest seed."""
    if SEED in space.keys:
        fix = (
            f"leave it out; then repeat the best trials with --sampler grid and --grid {SEED}=1,2,3"
        )
        raise UserError(
            "the seed is not a value to search for", "--sampler optuna, --grid seed", fix
        )
    try:
        import optuna  # noqa: F401
    except ModuleNotFoundError:
        raise UserError(
            "optuna is not installed",
            "--sampler optuna",
            "pip install 'optuna>=4,<5', or --sampler random",
        ) from None


class OptunaStudy:
    """Proposes trials 1, 2, ... `trials`. Recorded trials come first, and interrupted ones resume.

    Nothing of Optuna is stored. The study is recreated from the recorded trials and their events,
    so after an interruption it may propose other values than without.
    """

    def __init__(
        self,
        space: Space,
        seed: int,
        trials: int,
        recorded: list[Point],
        result_of: Callable[[Trial], Result],
        add: Callable[[Point], None],
    ) -> None:
        """result_of: returns the current result of a trial. add: called with each new point before
        its trial starts."""
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._optuna: Any = optuna
        self._space = space
        self._trials = trials
        self._result_of = result_of
        self._add = add
        distributions: Any = optuna.distributions
        self._distributions = {
            choice.key: _distribution(choice, distributions) for choice in space.choices
        }
        self._distributions |= {one.key: _distribution(one, distributions) for one in space.ranges}
        # Maximizes, because the direction of the objective is only known after a trial has started.
        self._study = optuna.create_study(
            direction="maximize", sampler=optuna.samplers.TPESampler(seed=seed)
        )
        self._asked: dict[str, Any] = {}  # trial name -> Optuna's trial
        self._reported: dict[str, int] = {}  # evaluations
        self._interrupted: list[Trial] = []
        self._number = len(recorded)
        for number, point in enumerate(recorded, start=1):
            self._restore(Trial(number, point))

    def following(self) -> Trial | None:
        if self._interrupted:
            return self._interrupted.pop(0)
        if self._number >= self._trials:
            return None
        asked = self._study.ask(self._distributions)
        texts = {one.key: one.text(asked.params[one.key]) for one in self._space.ranges}
        texts |= {one.key: asked.params[one.key] for one in self._space.choices}
        point = tuple(f"{key}={texts[key]}" for key in self._space.keys)
        self._number += 1
        trial = Trial(self._number, point)
        self._asked[trial.name] = asked
        self._add(point)
        return trial

    def ended(self, trial: Trial, result: Result) -> None:
        """Tells the study the result, unless the trial was stopped: the same command resumes it."""
        self._report(trial, result)
        if result.state == "stopped":
            return
        state: Any = self._optuna.trial.TrialState
        if result.state == "pruned":
            self._study.tell(self._asked[trial.name], state=state.PRUNED)
        elif result.state == "done" and math.isfinite(result.last):
            self._study.tell(self._asked[trial.name], _score(result, result.last))
        else:
            self._study.tell(self._asked[trial.name], state=state.FAIL)

    def is_hopeless(self, trial: Trial) -> bool:
        """Whether a trial is below the median of the others at the same evaluation, after five have
        ended (Optuna's MedianPruner)."""
        self._report(trial, self._result_of(trial))
        return bool(self._asked[trial.name].should_prune())

    def _report(self, trial: Trial, result: Result) -> None:
        for step, value in enumerate(result.values):
            if step >= self._reported.get(trial.name, 0) and math.isfinite(value):
                self._asked[trial.name].report(_score(result, value), step)
        self._reported[trial.name] = len(result.values)

    def _restore(self, trial: Trial) -> None:
        texts: dict[str, Any] = dict(argument.split("=", 1) for argument in trial.point)
        for one in self._space.ranges:
            texts[one.key] = int(texts[one.key]) if one.is_int else float(texts[one.key])
        self._study.enqueue_trial(texts)
        self._asked[trial.name] = self._study.ask(self._distributions)
        result = self._result_of(trial)
        if result.state in KEPT:
            self.ended(trial, result)
        else:
            self._interrupted.append(trial)


def _score(result: Result, value: float) -> float:
    return -value if result.metric.lower_is_better else value


def _distribution(one: Choice | Range, distributions: Any) -> Any:
    if isinstance(one, Choice):
        return distributions.CategoricalDistribution(one.values)
    if one.is_int:
        return distributions.IntDistribution(int(one.low), int(one.high), log=one.is_log)
    return distributions.FloatDistribution(float(one.low), float(one.high), log=one.is_log)
