"""task.name: model.loss and model.label_smoothing need classes, which classification and language
(the next token) have."""

from __future__ import annotations

from collections.abc import Iterator

from hvdtrain.config.exclusion import Exclusion, Values, above, among, options, other_than
from hvdtrain.config.plugins import is_dotted
from hvdtrain.config.schema import Config
from hvdtrain.config.sections.section import class_of_object, is_object
from hvdtrain.errors import UserError
from hvdtrain.features.data import DOCUMENTS
from hvdtrain.features.job_feature import JobFeature, PlannedJob


def _is_regression(config: Config) -> bool:
    return config.task.name == "regression"


def _is_classification(config: Config) -> bool:
    return config.task.name == "classification"


def _has_share_objective(config: Config) -> bool:
    return _is_classification(config) and config.task.options.get("objective") != "loss"


def _is_share(target: float) -> bool:
    return 0 <= target <= 1


def _another_loss(fix: str) -> Exclusion:
    return Exclusion(
        "model.loss",
        other_than("cross_entropy", "squared_error"),
        what="{set} needs task.name=classification, but this is {config.task.name}",
        fix=fix,
        why="it needs classes",
    )


def _loss_object(job: PlannedJob) -> Iterator[UserError]:
    """Yields an error for a script's loss, which has a separate option to ignore samples."""
    given = job.config.task.given
    if is_object(job.config.task.name) and (
        given is None or "loss" in given.objects
    ):  # a prediction uses the task of its checkpoint
        what = (
            "task.ignore_label needs task.name=classification, but this job has the loss "
            f"{class_of_object(job.config.task.name)}"
        )
        yield UserError(
            what,
            job.where("task.ignore_label"),
            "CrossEntropyLoss(ignore_index=N), or leave loss= of hvdtrain.train() out",
        )


REGRESSION = JobFeature(
    key="task.name",
    is_value=True,
    on=_is_regression,
    examples=("task.name=regression",),
    excludes=(
        _another_loss("task.loss=squared_error, which is its default"),
        Exclusion(
            "model.label_smoothing",
            Values(bool, 0.1),
            what="model.label_smoothing={config.model.label_smoothing:g} spreads the label of a "
            "class, which {chosen} does not have",
            fix="leave it out",
            why="numbers have no label to spread",
        ),
    ),
)
LANGUAGE = JobFeature(
    key="task.name",
    is_value=True,
    on=lambda config: config.task.name == "language",
    examples=("task.name=language",),
    excludes=(_another_loss("leave it out"),),
)
# without documents no data of this copy have chats
_CHATS = "data.messages=FIELD with data.name=jsonl, or " if DOCUMENTS else ""
LOSS_ON = JobFeature(
    key="task.loss_on",
    is_value=True,  # an option of language
    on=lambda config: config.task.options.get("loss_on") == "assistant",
    chosen=lambda config: "task.loss_on=assistant",
    examples=tuple(
        f"task.loss_on=assistant data.messages=messages data.name={name} task.name=language"
        for name in DOCUMENTS
    ),
    excludes=(
        Exclusion(
            "log.noise_scale",
            among(True),
            what="{set} compares means over samples, but with {chosen} their weights differ",
            fix="log.noise_scale=false, or task.loss_on=all",
            why="the noise scale compares means over samples, but their weights differ",
        ),
    ),
    rules=(
        Exclusion(
            "data.name",
            Values(lambda name: True, "text"),
            what="{chosen} needs chats, whose answers are known; {set} has none",
            fix=f"{_CHATS}task.loss_on=all",
            where="task.loss_on",
            when=lambda config: config.data.options.get("messages") is None,
        ),
    ),
)
IGNORED_LABEL = JobFeature(
    key="task.ignore_label",
    is_value=True,  # an option of some tasks
    on=lambda config: config.task.options.get("ignore_label") is not None,
    chosen=lambda config: "task.ignore_label",
    examples=("task.ignore_label=0",),
    excludes=(
        *(
            Exclusion(
                key,
                Values(bool, 0.2),
                what="{key} mixes each sample with any other, but task.ignore_label leaves some "
                "without a class to mix",
                where="task.ignore_label",
                fix="{key}=0, or leave task.ignore_label out",
                when=_is_classification,
                why="some samples have no class to mix",
            )
            for key in ("augment.mixup", "augment.cutmix")
        ),
        Exclusion(
            "log.noise_scale",
            among(True),
            what="log.noise_scale compares means over samples, but with task.ignore_label their "
            "weights differ",
            fix="log.noise_scale=false, or leave task.ignore_label out",
            why="the noise scale compares means over samples, but their weights differ",
        ),
    ),
    rules=(_loss_object,),
)


def _class_metrics(config: Config) -> list[str]:
    """Returns the metrics of task.metrics, and an objective that is one of them."""
    if not _is_classification(config):
        return []
    options = config.task.options
    objective = str(options.get("objective") or "accuracy")
    own = [] if objective in ("loss", "accuracy") or objective.startswith("top") else [objective]
    return [*(options.get("metrics") or ()), *own]


CLASS_METRICS = JobFeature(
    key="task.metrics",
    is_value=True,  # an option of classification
    on=lambda config: bool(_class_metrics(config)),
    chosen=lambda config: "task.metrics",
    examples=("task.metrics=[f1,auroc,calibration_error]",),
    excludes=(
        Exclusion(
            "model.loss",
            Values(lambda loss: loss == "squared_error", "squared_error"),
            what="calibration_error compares probabilities, which {set} does not have",
            where="task.metrics",
            fix="leave calibration_error out, or model.loss=cross_entropy",
            when=lambda config: "calibration_error" in _class_metrics(config),
            why="the calibration error compares probabilities",
        ),
    ),
)
GAPS = JobFeature(
    key="data.gaps",
    on=lambda config: bool(config.data.gaps),
    examples=("data.gaps=[y] task.name=regression",),
    off="data.gaps=[]",
    excludes=(
        Exclusion(
            "task.name",
            Values(lambda name: name != "regression" and not is_object(name), "language"),
            what="{chosen} needs task.name=regression, but this is {set}",
            fix="task.name=regression, or data without missing values",
            why="only regression leaves numbers out of the loss",
        ),
        Exclusion(
            "log.noise_scale",
            among(True),
            what="log.noise_scale compares means over samples, but with data.gaps their weights "
            "differ",
            fix="log.noise_scale=false, or leave data.gaps out",
            when=lambda config: "y" in config.data.gaps,
            why="the noise scale compares means over samples, but their weights differ",
        ),
    ),
)
LOG_TARGETS = JobFeature(
    key="log.targets",
    on=lambda config: bool(config.log.targets),
    examples=("log.targets=[0.4]",),
    off="log.targets=[]",
    rules=(
        Exclusion(
            "log.targets",
            Values(lambda targets: not all(map(_is_share, targets)), [95.0]),
            what="{set} contains values outside 0 to 1, the range of accuracies",
            fix="log.targets=[0.9] for 90 %",
            when=_has_share_objective,
        ),
    ),
)
STOP_TARGET = JobFeature(
    key="stop.target",
    on=lambda config: config.stop.target is not None,
    examples=("stop.target=0.99",),
    off="stop.target=null",
    without=options("stop.target", {"stop.target_for": 2}, fix="stop.target=VALUE"),
    rules=(
        Exclusion(
            "stop.target",
            Values(lambda target: not _is_share(target), 85.0),
            what="stop.target={config.stop.target:g} is outside 0 to 1, the range of accuracies",
            fix="stop.target=0.9 for 90 %",
            when=_has_share_objective,
        ),
    ),
)


def answers(name: str, *others: Exclusion) -> JobFeature:
    """Returns the feature of a task with several answers per sample; others: more exclusions."""
    return JobFeature(
        key="task.name",
        is_value=True,
        on=lambda config: config.task.name == name,
        examples=(f"task.name={name}",),
        excludes=(
            _another_loss("leave it out"),
            Exclusion(
                "model.label_smoothing",
                Values(bool, 0.1),
                what="{set} needs task.name=classification or language, but this is {chosen}",
                fix="leave it out",
                why="a sample does not have one class",
            ),
            *others,
        ),
    )


def mixes(key: str, fix: str) -> Exclusion:
    return Exclusion(
        key,
        above(0),
        what="{key} mixes the labels of classes, which {chosen} does not have",
        fix=fix,
        why="a sample does not have one class to mix",
    )


# task.name=package.module:build: a task of the user, or one of hvdtrain's with metrics of the user
# or of torchmetrics.
USER_TASK = JobFeature(
    key="task.name",
    is_value=True,
    on=lambda config: is_dotted(config.task.name) and not is_object(config.task.name),
    examples=("task.name=mine:measured",),
)
