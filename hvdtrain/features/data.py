"""Keys of data, augment.crop and evaluate.views: how samples are drawn, read, padded, packed and cropped, and seen by an evaluation."""

from __future__ import annotations

from collections.abc import Iterator

from hvdtrain.config.schema import AugmentConfig, DataConfig
from hvdtrain.config.section import is_object
from hvdtrain.errors import UserError
from hvdtrain.features.job_feature import Exclusion, JobFeature, PlannedJob, Values, above, always, among, as_set, other_than, value_of

READERS = JobFeature(
    key="data.readers",
    on=lambda config: bool(config.data.readers),
    examples=("data.readers=2",),
    off="data.readers=null",
    excludes=(
        Exclusion(
            "data.ahead",
            among(0),
            what="{chosen} threads read steps ahead, and {set} reads none ahead",
            where="data.readers",
            fix="data.ahead=2, or leave data.readers out",
            why="without steps ahead threads have nothing to read",
        ),
    ),
)


def _partition_by_blocks(job: PlannedJob) -> Iterator[UserError]:
    if job.config.data.sampling == "partition":
        what = "data.shuffle=blocks gives each rank the blocks of its own share of a step, and data.sampling=partition other positions"
        yield UserError(what, job.where("data.sampling"), "data.sampling=global, or data.shuffle=full")


def _blocks_alone(job: PlannedJob) -> Iterator[UserError]:
    for key, usual in (("data.shuffle_block", None), ("data.shuffle_window", DataConfig.model_fields["shuffle_window"].default)):
        if job.config.data.shuffle != "blocks" and value_of(job.config, key) != usual:
            yield UserError(f"{key} needs data.shuffle=blocks", job.where(key), f"data.shuffle=blocks, or leave {key} out")


BLOCKS = JobFeature(key="data.shuffle", on=lambda config: config.data.shuffle == "blocks", rules=(_partition_by_blocks,))
BLOCK_KEYS = JobFeature(key="data.shuffle", on=always, rules=(_blocks_alone,))


def _not_by_weight(job: PlannedJob) -> Iterator[UserError]:
    """What is of samples that each epoch has once, or takes neighbours together."""
    config = job.config
    refused = {
        "data.shuffle": (config.data.shuffle == "blocks", "neighbours are read together, and draws are one by one"),
        "data.sampling": (config.data.sampling == "partition", "samples are divided among the ranks, and a draw takes any of them"),
        "augment.mixup": (config.augment.mixup > 0, "partners are drawn without weights"),
        "augment.cutmix": (config.augment.cutmix > 0, "partners are drawn without weights"),
        "augment.flip": (config.augment.flip == "alternating", "it is of epochs that have each sample once"),
        "recipe.sample_noise": (config.recipe.sample_noise > 0, "each sample of a step has its noise once, and may be drawn twice"),
    }
    for key, (is_on, why) in refused.items():
        if is_on:
            what = f"{as_set(config, key)} does not go with data.sample_weights, which draws with replacement: {why}"
            yield UserError(what, job.where(key), f"leave {key} out, or data.sample_weights")


SAMPLE_WEIGHTS = JobFeature(key="data.sample_weights", on=lambda config: config.data.sample_weights is not None, rules=(_not_by_weight,))


def _one_length(job: PlannedJob) -> Iterator[UserError]:
    """Where ranks exchange activations, those of all passes have one shape."""
    parallel = job.config.parallel
    for key, is_on in {
        "parallel.pipeline": parallel.pipeline > 1,
        "parallel.sequence": parallel.sequence,
        "parallel.dense": parallel.dense != "none",
    }.items():
        if is_on:
            what = f"{as_set(job.config, key)} exchanges activations of one shape, and with data.pad that of each pass is another one"
            yield UserError(what, job.where(key), f"leave {key} out; or pad the samples to one length in the data, and leave data.pad out")


PAD = JobFeature(key="data.pad", on=lambda config: bool(config.data.pad), rules=(_one_length,))


def _rows(job: PlannedJob) -> Iterator[UserError]:
    """What is of samples that are single sequences, or of a model that gets tokens alone."""
    config = job.config
    if config.task.name != "language" and not is_object(config.task.name):  # a loss of a script is refused where its task is made
        what = f"data.pack packs tokens for task.name=language, and this is task.name={config.task.name}"
        yield UserError(what, job.where("data.pack"), "task.name=language, or leave data.pack out")
    for key, is_on, why in (
        ("data.pad", bool(config.data.pad), "a row has no sequence alone, which could be padded"),
        ("data.bucket_by", config.data.bucket_by is not None, "all rows have one length"),
        ("data.sample_weights", config.data.sample_weights is not None, "a row has several samples of the data"),
        ("parallel.tensor", config.parallel.tensor > 1, "it cuts models that get tokens alone"),
        ("parallel.pipeline", config.parallel.pipeline > 1, "it cuts models that get tokens alone"),
        ("parallel.sequence", config.parallel.sequence, "it cuts models that get tokens alone"),
        ("parallel.dense", config.parallel.dense != "none", "it cuts models that get tokens alone"),
    ):
        if is_on:
            fix = f"leave {key} out, or data.pack"
            yield UserError(f"{as_set(config, key)} does not go with data.pack: {why}", job.where(key), fix)


PACK = JobFeature(key="data.pack", on=lambda config: config.data.pack is not None, rules=(_rows,))


def _buckets(job: PlannedJob) -> Iterator[UserError]:
    data = job.config.data
    if not data.pad:
        what = f"data.bucket_by={data.bucket_by} is of samples of different lengths, and there is no data.pad"
        yield UserError(what, job.where("data.bucket_by"), "data.pad={tokens: 0}, or leave data.bucket_by out")
    if data.sampling == "partition":
        what = "data.bucket_by divides the samples of a step by their lengths, and data.sampling=partition by their positions"
        yield UserError(what, job.where("data.sampling"), "data.sampling=global, or leave data.bucket_by out")


BUCKETS = JobFeature(key="data.bucket_by", on=lambda config: config.data.bucket_by is not None, rules=(_buckets,))


CROP = JobFeature(
    key="augment.crop",
    on=lambda config: config.augment.crop > 0,
    examples=("augment.crop=1",),
    off="augment.crop=0",
    without=(
        Exclusion(
            "augment.pad",
            other_than("zeros", "reflect"),
            what="{set} is what augment.crop pads with, and there is no augment.crop",
            fix="augment.crop=2, or leave augment.pad out",
        ),
    ),
    excludes=(
        Exclusion(
            "augment.resized_crop",
            Values(bool, 0.5),
            what="{chosen} and augment.resized_crop={config.augment.resized_crop:g} both crop the image",
            where="augment.crop",
            fix="keep one of them",
            why="both crop the image",
        ),
    ),
)


def _magnitude_of_nothing(job: PlannedJob) -> Iterator[UserError]:
    config = job.config.augment
    if config.magnitude != AugmentConfig.model_fields["magnitude"].default and not config.rand_augment:
        what = f"augment.magnitude={config.magnitude} is of augment.rand_augment, and there is none"
        yield UserError(what, job.where("augment.magnitude"), "augment.rand_augment=2, or leave augment.magnitude out")


def _half_a_turn(job: PlannedJob) -> Iterator[UserError]:
    hue = job.config.augment.color_jitter[3:]
    if hue and hue[0] > 0.5:
        what = f"augment.color_jitter turns hues by up to {hue[0]:g} of the colour circle; 0.5 is all of it"
        yield UserError(what, job.where("augment.color_jitter"), "brightness, contrast, saturation, hue: [0.4,0.4,0.4,0.1]")


COLOURS = JobFeature(key="augment.rand_augment", on=always, rules=(_magnitude_of_nothing, _half_a_turn))


# evaluate.views: what the model says of an image is the mean over several views of it.
VIEWS = JobFeature(
    key="evaluate.views",
    on=lambda config: config.evaluate.views > 1,
    examples=("evaluate.views=2",),
    off="evaluate.views=1",
    excludes=(
        Exclusion(
            "task.name",
            other_than("classification", "regression"),
            what="{chosen} is of images of classes; the job has {set}",
            where="evaluate.views",
            fix="task.name=classification, or leave it out",
            why="views are of images of classes",
        ),
        Exclusion(
            "parallel.pipeline",
            above(1),
            what="{chosen} averages the outputs of several passes, which {set} does not keep",
            where="evaluate.views",
            fix="evaluate.views=1, and `evaluate RUN evaluate.views=6` afterwards",
            why="a pipeline does not keep the outputs of several passes",
        ),
    ),
)
