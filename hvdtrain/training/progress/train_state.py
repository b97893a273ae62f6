"""The progress of a job: with the seed and the arrays, everything that a resume needs. Converts to
and from JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache
from typing import Annotated, Any, NamedTuple

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError, WrapValidator

from hvdtrain.config.sections.evaluate import EvaluateConfig
from hvdtrain.core.metrics import Better, Sums, add_sums, host_value, is_better, reaches, zero_sums
from hvdtrain.core.progress import Progress
from hvdtrain.recipe.plateau import INFINITIES, NumberOrInfinity, Plateau

Count = Annotated[int, Field(ge=0, lt=2**63)]
Number = Annotated[float, Field(allow_inf_nan=False)]
Seconds = Annotated[float, Field(allow_inf_nan=False, ge=0, le=1e11)]
# null in JSON
NumberOrNaN = Annotated[
    Number, WrapValidator(lambda value, number: math.nan if value is None else number(value))
]
# The values of metrics, which may divide by 0.
Objective = Annotated[
    NumberOrInfinity,
    WrapValidator(lambda value, number: math.nan if value is None else number(value)),
]


def _no_sums() -> dict[str, Any]:
    """Returns the sums of classification. Like the other defaults of TrainState, they are for tests
    and old checkpoints."""
    return zero_sums(("loss", "right"))


def _check_progress(progress: Progress) -> Progress:
    """Returns the progress. Raises ValueError for an impossible count."""
    counts = asdict(progress)
    if (
        not all(0 <= count < 2**53 for count in counts.values())
        or not progress.dataset
        or progress.step > progress.samples
    ):
        raise ValueError(f"impossible counts {counts}")
    return progress


class Reached(NamedTuple):
    """The first evaluation at a value of log.targets."""

    target: Number
    value: NumberOrInfinity  # of the objective
    seconds: Seconds  # spent in the job
    epochs: Number
    images: Count  # samples trained on
    joules: Number | None  # None if not measured


@dataclass(frozen=True)
class TrainState:
    """State of the whole job, over all its runs. It is recorded at a sync point, so no sum is
    pending on the device.

    The types also define progress.json: from_json() checks a checkpoint against them.
    """

    progress: Annotated[Progress, AfterValidator(_check_progress)]
    seconds: Seconds = 0.0  # spent in this job so far
    epoch: Count = 0  # whole epochs done at the last evaluation
    evaluated: Count = 0  # steps done at the last evaluation
    evaluates: Count = 0  # samples of an evaluation; 0: unknown, in an old checkpoint
    views: Count = 1  # evaluate.views of each of these samples
    epoch_s: Seconds = 0.0  # seconds of training since the last evaluation
    # over all ranks, since the last evaluation
    sums: dict[str, Objective | tuple[Objective, ...]] = field(default_factory=_no_sums)
    objective: str = "accuracy"  # the metric of the next fields, and which of its values are better
    better: Better = "max"
    at_target: Count = 0  # evaluations in a row, up to now, at the value `target`
    target: Number | None = None
    without_better: Count = (
        0  # evaluations in a row, up to now, no better than `to_beat` by more than stop.min_delta
    )
    to_beat: Objective = math.nan  # the last value that was
    last: Objective = math.nan  # of the last evaluation
    best: Objective = math.nan  # of all evaluations
    best_epoch: Count = 0  # epoch that contains or ends with this evaluation, counted from 1
    evaluated_s: Seconds = 0.0  # `seconds` at the last evaluation
    trained_s: Seconds = 0.0  # `seconds` in steps not discarded, up to the last evaluation
    trained_images: Count = 0  # samples of those steps
    gpu_j: NumberOrNaN = 0.0  # joules of the whole job; NaN if some were not measured
    cpu_j: NumberOrNaN = 0.0
    epoch_gpu_j: NumberOrNaN = 0.0  # since the last evaluation
    epoch_cpu_j: NumberOrNaN = 0.0
    reached: tuple[Reached, ...] = ()
    nonfinite: Count = 0  # steps skipped, or rollbacks
    lr: NumberOrNaN = 0.0  # rate of the last step; NaN if only a script's transformation knows it
    batch: Count = 0  # of the last step
    plateau: Plateau = field(default_factory=Plateau)  # the effect of evaluations on the rate
    # the moving sums of the gradient noise scale: signal, noise
    noise: tuple[Number, Number] = (
        0.0,
        0.0,
    )
    ended_by: str = ""  # the hook that has ended the job, and why
    # the states of hooks, by their names: trees of JSON
    hooks: dict[str, Any] = field(default_factory=dict)
    is_kept: bool = (
        False  # a script asked to keep this checkpoint regardless of checkpoint.keep_last
    )

    def trained(self, sums: Sums, seconds: float, noise: tuple[float, float]) -> TrainState:
        """Returns the state after more steps, with their sums and time."""
        total = add_sums(self.sums, {name: host_value(sums[name]) for name in self.sums})
        return replace(self, sums=total, epoch_s=self.epoch_s + seconds, noise=noise)

    def add_energy(self, sums: Sums) -> TrainState:
        """Returns the state with more joules added; NaN if nothing measures them."""
        gpu_j = sums.get("joules.gpu", math.nan)
        cpu_j = sums.get("joules.cpu", math.nan)
        return replace(
            self,
            gpu_j=self.gpu_j + gpu_j,
            cpu_j=self.cpu_j + cpu_j,
            epoch_gpu_j=self.epoch_gpu_j + gpu_j,
            epoch_cpu_j=self.epoch_cpu_j + cpu_j,
        )

    def comparable(self, other: TrainState) -> bool:
        """Whether both are evaluated on the same number of samples, and of views of each."""
        return self.views == other.views and (
            self.evaluates == other.evaluates or 0 in (self.evaluates, other.evaluates)
        )

    def evaluated_by(self, evaluate: EvaluateConfig, samples: int) -> TrainState:
        """Returns the state of a job that evaluates a set of so many samples, or evaluate.samples
        of it."""
        return replace(self, evaluates=evaluate.samples or samples, views=evaluate.views)

    def difference(self, other: TrainState) -> str:
        """Returns what the evaluations of `other` and of this state are of; empty if they are
        comparable."""
        if self.comparable(other):
            return ""
        if self.views == other.views:
            return f"evaluations are of {other.evaluates:,} samples, and were of {self.evaluates:,}"
        of = f"view{'s' if other.views > 1 else ''} of each sample"
        return f"evaluations are of {other.views:,} {of}, and were of {self.views:,}"

    def evaluated_as(self, other: TrainState) -> TrainState:
        """Returns the state with the evaluations of another one."""
        return replace(self, evaluates=other.evaluates, views=other.views)

    @property
    def rank_of_last(self) -> float:
        """A sort key of the last evaluation: the smaller, the better."""
        return -self.last if self.better == "max" else self.last

    @property
    def trained_samples(self) -> int:
        """The number of samples trained since the last evaluation."""
        return round(self.sums.get("count", 0))  # type: ignore[arg-type]

    def forget_evaluations(self) -> TrainState:
        """Resets evaluations, if the next ones cannot be compared with earlier ones."""
        plateau = Plateau(share=self.plateau.share)
        values = replace(self, to_beat=math.nan, last=math.nan, best=math.nan, best_epoch=0)
        return replace(values, at_target=0, without_better=0, plateau=plateau)

    def after_evaluation(
        self, value: float, target: float | None, seconds: float, min_delta: float = 0.0
    ) -> TrainState:
        """Returns the state after an evaluation, `seconds` into the job. value: of the objective;
        target: stop.target; min_delta: stop.min_delta."""
        improves = is_better(value, self.best, self.better)  # the first one too
        beats = is_better(
            value - min_delta if self.better == "max" else value + min_delta,
            self.to_beat,
            self.better,
        )
        return replace(
            self,
            seconds=seconds,
            epoch=self.progress.epoch,
            evaluated=self.progress.step,
            evaluated_s=seconds,
            epoch_s=0.0,
            sums=zero_sums(name for name in self.sums if name != "count"),
            at_target=self.at_target + 1
            if target is not None and reaches(value, target, self.better)
            else 0,
            target=target,
            without_better=0 if beats else self.without_better + 1,
            to_beat=value if beats else self.to_beat,
            last=value,
            best=value if improves else self.best,
            best_epoch=self.epoch + 1 if improves else self.best_epoch,
            trained_s=self.trained_s + self.epoch_s,
            trained_images=self.trained_images + self.trained_samples,
            epoch_gpu_j=0.0,
            epoch_cpu_j=0.0,
        )


# Missing in checkpoints from before hvdtrain 0.1 measured energy and had tasks other than
# classification.
_ADDED: dict[str, Any] = {
    "objective": "accuracy",
    "better": "max",
    "evaluates": 0,
    "views": 1,
    "best": None,
    "best_epoch": 0,
    "evaluated_s": 0.0,
    "trained_s": 0.0,
    "trained_images": 0,
    "gpu_j": None,
    "cpu_j": None,
    "epoch_gpu_j": None,
    "epoch_cpu_j": None,
    "reached": [],
    "without_better": 0,
    "is_kept": False,
    "ended_by": "",
    "hooks": {},
    "plateau": list(Plateau()),
}


def to_json(train_state: TrainState) -> dict[str, Any]:
    """Converts to a tree for json.dumps(); NaN becomes None, infinities become words."""
    tree: dict[str, Any] = _plain(asdict(train_state))
    return tree


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return (
        None
        if math.isnan(value)
        else next(word for word, infinity in INFINITIES.items() if infinity == value)
    )


def from_json(tree: dict[str, Any]) -> TrainState:
    """Converts from JSON. Raises ValueError, LookupError or TypeError if a value is missing, of
    another type, or out of range."""
    tree = (
        _ADDED
        | ({"last": tree["accuracy"]} if "accuracy" in tree else {})
        | {"to_beat": tree.get("best")}
        | tree
    )
    # a default is for a new job: a checkpoint has every value
    tree = _pick(tree, [each.name for each in fields(TrainState)])
    tree["progress"] = _pick(tree["progress"], [each.name for each in fields(Progress)])
    _pick(tree["sums"], ("loss", "count"))
    try:
        # as JSON: a list is a tuple, and true or "1" is not a number
        return _adapter().validate_json(json.dumps(tree), strict=True)
    except ValidationError as error:
        raise ValueError(_summary(error)) from None


def _pick(tree: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Selects entries of a tree. Raises KeyError if one is missing."""
    return {name: tree[name] for name in names}


@cache
def _adapter() -> TypeAdapter[TrainState]:
    return TypeAdapter(TrainState)


def _summary(error: ValidationError) -> str:
    """Formats an error on one line: progress.step: Input should be a valid integer, not 'x'."""
    first = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    return f"{where}: {first['msg']}, not {first['input']!r:.40}"
