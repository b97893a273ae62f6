"""How far a job is: with the seed and the arrays, all that is needed to go on; and its form in JSON."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

from hvdtrain.core.metrics import Sums, add_sums, zero_sums
from hvdtrain.core.progress import Progress

_JOULES = ("gpu_j", "cpu_j", "epoch_gpu_j", "epoch_cpu_j")


class Reached(NamedTuple):
    """The first evaluation at an accuracy that was asked for."""

    target: float
    val_accuracy: float
    seconds: float  # spent in the job
    epochs: float
    images: int  # samples trained on
    joules: float | None  # None where they were not measured


@dataclass(frozen=True)
class TrainState:
    """Of the whole job, over all its runs. It is taken where the ranks meet, so no sum is under way on the device."""

    progress: Progress
    seconds: float = 0.0  # spent in this job so far
    epoch: int = 0  # whole epochs done at the last evaluation
    evaluated: int = 0  # steps done at the last evaluation
    epoch_s: float = 0.0  # seconds of training since the last evaluation
    sums: Sums = field(default_factory=zero_sums)  # over all ranks, since the last evaluation
    at_target: int = 0  # epochs in a row, up to now, at the accuracy `target`
    target: float | None = None
    accuracy: float = math.nan  # of the last evaluation
    best: float = math.nan  # accuracy of all evaluations, and the whole epochs done then
    best_epoch: int = 0
    evaluated_s: float = 0.0  # `seconds` at the last evaluation
    trained_s: float = 0.0  # of `seconds`: those of steps that were not thrown away, up to the last evaluation
    trained_images: int = 0  # samples of those
    gpu_j: float = 0.0  # joules of the whole job, NaN where some were not measured
    cpu_j: float = 0.0
    epoch_gpu_j: float = 0.0  # since the last evaluation
    epoch_cpu_j: float = 0.0
    reached: tuple[Reached, ...] = ()
    nonfinite: int = 0  # steps skipped, or rollbacks
    lr: float = 0.0  # of the last step
    batch: int = 0  # of the last step
    noise: tuple[float, float] = (0.0, 0.0)  # the moving sums of the gradient noise scale: signal, noise

    def trained(self, sums: Sums, seconds: float, noise: tuple[float, float]) -> TrainState:
        """With the sums and the time of more steps."""
        whole = add_sums(self.sums, {name: sums[name] for name in zero_sums()})
        return replace(self, sums=whole, epoch_s=self.epoch_s + seconds, noise=noise)

    def add_energy(self, sums: Sums) -> TrainState:
        """With the joules of more work."""
        gpu, cpu = sums.get("joules.gpu", 0.0), sums.get("joules.cpu", 0.0)
        epoch = {"epoch_gpu_j": self.epoch_gpu_j + gpu, "epoch_cpu_j": self.epoch_cpu_j + cpu}
        return replace(self, gpu_j=self.gpu_j + gpu, cpu_j=self.cpu_j + cpu, **epoch)

    def after_evaluation(self, accuracy: float, target: float | None) -> TrainState:
        """After the evaluation of an epoch."""
        at_target = self.at_target + 1 if target is not None and accuracy >= target else 0
        began = {"epoch": self.progress.epoch, "evaluated": self.progress.step, "epoch_s": 0.0, "sums": zero_sums()}
        began |= {
            "trained_s": self.trained_s + self.epoch_s,
            "trained_images": self.trained_images + round(self.sums["count"]),
            "epoch_gpu_j": 0.0,
            "epoch_cpu_j": 0.0,
        }
        if not accuracy <= self.best:  # the first one too
            began |= {"best": accuracy, "best_epoch": self.epoch + 1}
        return replace(self, at_target=at_target, target=target, accuracy=accuracy, **began)  # type: ignore[arg-type]


def to_json(train_state: TrainState) -> dict[str, Any]:
    tree = asdict(train_state)
    return {name: None if isinstance(value, float) and math.isnan(value) else value for name, value in tree.items()}


def from_json(tree: dict[str, Any]) -> TrainState:
    """ValueError, KeyError or TypeError where a number is missing, is none, or cannot be."""
    counts = {name: tree["progress"][name] for name in ("dataset", "total", "step", "samples")}
    whole = {name: tree[name] for name in ("epoch", "evaluated", "at_target", "nonfinite", "batch")} | {
        name: tree.get(name, 0) for name in ("best_epoch", "trained_images")
    }
    odd = {name: n for name, n in (counts | whole).items() if type(n) is not int or not 0 <= n < 2**63}
    if odd or not counts["dataset"]:
        raise ValueError(f"counts that cannot be: {odd or counts}")
    numbers = {name: _number(tree[name]) for name in ("seconds", "epoch_s", "lr")} | {
        name: _number(tree.get(name, 0.0)) for name in ("trained_s", "evaluated_s")
    }
    sums = {name: _number(tree["sums"][name]) for name in zero_sums()}
    signal, noise = (_number(x) for x in tree["noise"])
    target = None if tree["target"] is None else _number(tree["target"])
    unknown = dict.fromkeys(("best", *_JOULES)) | {"reached": []}
    tree = unknown | tree  # checkpoints of hvdtrain 0.1 before it measured energy have none of these
    maybe = {name: math.nan if tree[name] is None else _number(tree[name]) for name in ("accuracy", "best", *_JOULES)}
    reached = tuple(_reached(entry) for entry in tree["reached"])
    return TrainState(Progress(**counts), sums=sums, target=target, noise=(signal, noise), reached=reached, **maybe, **numbers, **whole)  # type: ignore[arg-type]


def _reached(entry: Any) -> Reached:
    target, accuracy, seconds, epochs, images, joules = entry
    known = None if joules is None else _number(joules)
    return Reached(_number(target), _number(accuracy), _number(seconds), _number(epochs), int(_number(images)), known)


def _number(value: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise ValueError(f"not a finite number: {value!r:.40}")
    return float(value)
