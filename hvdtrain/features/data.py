"""Keys of data, augment.crop and evaluate.views: how samples are drawn, read, padded, packed and
cropped, and how an evaluation sees them."""

from __future__ import annotations

from hvdtrain.config.exclusion import Exclusion, Values, above, among, options, other_than
from hvdtrain.config.schema import Config
from hvdtrain.config.sections.data import DataConfig
from hvdtrain.config.sections.section import is_object
from hvdtrain.core.extras import document_files
from hvdtrain.features.job_feature import JobFeature
from hvdtrain.recipe.recipe import Recipe

DOCUMENTS = tuple(dict.fromkeys(document_files().values()))  # data sets of texts and chats
READERS = JobFeature(
    key="data.readers",
    on=lambda config: bool(config.data.readers),
    examples=("data.readers=2",),
    off="data.readers=null",
    excludes=(
        Exclusion(
            "data.ahead",
            among(0),
            what="{chosen} needs prefetching, but {set} disables it",
            where="data.readers",
            fix="data.ahead=2, or leave data.readers out",
            why="threads only read steps ahead of the current one",
        ),
    ),
)


def _blocks(data: DataConfig) -> str:
    size = "" if data.shuffle_block is None else f" of {data.shuffle_block:,}"
    return f"shuffled by {data.shuffle_window} blocks{size}"


BLOCKS = JobFeature(
    key="data.shuffle",
    on=lambda config: config.data.shuffle == "blocks",
    examples=("data.shuffle=blocks data.shuffle_block=3 data.shuffle_window=2",),
    off="data.shuffle=full",
    words_of_reading=lambda config, recipe, readers: _blocks(config.data),
    why="a rank reads the blocks of its share of a step",
    without=options("data.shuffle=blocks", {"data.shuffle_block": 8, "data.shuffle_window": 4}),
    excludes=(
        Exclusion(
            "data.sampling",
            among("partition"),
            what="{chosen} gives each rank the blocks of its share of a step, but {set} gives it "
            "other positions",
            fix="data.sampling=global, or {off}",
        ),
    ),
)


def _of_single_samples(key: str, values: Values, why: str, words: str = "") -> Exclusion:
    what = f"data.sample_weights draws with replacement and does not support {{set}}: {why}"
    return Exclusion(
        key, values, what=what, fix="leave {key} out, or data.sample_weights", why=why, words=words
    )


def _weights(config: Config) -> str:
    weights = config.data.sample_weights
    of_script = weights is not None and is_object(weights)
    by = "of the script" if of_script else f"data.sample_weights={weights}"
    return f"drawn with replacement by weights, {by}"


SAMPLE_WEIGHTS = JobFeature(
    key="data.sample_weights",
    on=lambda config: config.data.sample_weights is not None,
    examples=("data.sample_weights=balanced",),
    off="data.sample_weights=null",
    is_extra=True,
    words_of_reading=lambda config, recipe, readers: _weights(config),
    excludes=(
        _of_single_samples(
            "data.shuffle",
            among("blocks"),
            "blocks of neighbours are read together, but samples are drawn one by one",
        ),
        _of_single_samples(
            "data.sampling",
            among("partition"),
            "any rank may draw any sample, but a partition divides the samples",
        ),
        _of_single_samples("augment.mixup", above(0), "partners are drawn without weights"),
        _of_single_samples("augment.cutmix", above(0), "partners are drawn without weights"),
        _of_single_samples(
            "augment.flip", among("alternating"), "an epoch may draw a sample twice or never"
        ),
        _of_single_samples(
            "recipe.sample_noise",
            above(0),
            "a step may draw a sample twice, but would use the same noise for both",
            "optim.base_batch=6",
        ),
    ),
)

ONE_SHAPE = "ranks exchange activations of one shape, but micro-batches have different lengths"


def _padded(config: Config, recipe: Recipe, readers: int) -> str:
    by = "" if config.data.bucket_by is None else ", similar lengths in one pass"
    batch = recipe.batch
    # samples of a micro-batch
    most = config.batch.micro if isinstance(config.batch.micro, int) else batch.first
    if by and readers == 1 and max(batch.first, *batch.to, 0) <= most:
        by = (
            " (data.bucket_by has no effect: a step is one pass of one rank; batch.micro=N "
            "divides it)"
        )
    return f"padded to the longest of each pass{by}"


PAD = JobFeature(
    key="data.pad",
    other_keys=("data.mask",),
    on=lambda config: bool(config.data.pad),
    examples=('data.pad={"tokens":0} task.name=language',),
    off="data.pad={{}}",
    words_of_reading=_padded,
    what="data.pad does not support {set}: " + ONE_SHAPE,
    fix="leave {key} out; or pad all samples to one length in the data, and leave data.pad out",
    why=ONE_SHAPE,
)


# Texts and chats, of a data set of documents or a column of a table, are padded without data.pad.
TEXTS = JobFeature(
    key="data.name",
    is_value=True,
    on=lambda config: config.data.is_of_texts,
    examples=tuple(f"data.name={name} task.name=language" for name in DOCUMENTS),
    words_of_reading=lambda config, recipe, readers: (
        _padded(config, recipe, readers) if config.data.pack is None else ""
    ),
    what="texts of data.name={config.data.name} do not support {set}: " + ONE_SHAPE,
    fix="leave {key} out; or data.name=text, whose windows have one length",
    why=ONE_SHAPE,
    excludes=(
        Exclusion(
            "framework",
            other_than("torch", "jax"),
            what="texts of data.name={config.data.name} have different lengths, which needs "
            "framework=torch, but this is {set}",
            fix="framework=torch; or data.name=text, whose windows have one length",
            why="only torch supports samples of different lengths",
        ),
        *(
            Exclusion(
                key,
                Values(bool, example),
                what="data.name={config.data.name} pads texts by itself, so {set} has no effect",
                fix="leave {key} out; data.pad_token chooses the token",
                why="texts are padded without it",
            )
            for key, example in (
                ("data.pad", '{"tokens":0}'),
                ("data.mask", '{"tokens":"mask"}'),
            )
        ),
        *(
            Exclusion(
                "task.name",
                among(task),
                what="texts of data.name={config.data.name} become tokens, but {set} needs "
                f"{needed}",
                where="data.name",
                fix="task.name=language, or classification with data.target=FIELD",
                why=f"texts become tokens, not {needed}",
            )
            for task, needed in (("segmentation", "images"), ("multilabel", "several labels"))
        ),
    ),
)


def of_rows(key: str, values: Values, why: str) -> Exclusion:
    """Returns a row of data.pack."""
    return Exclusion(
        key,
        values,
        what=f"data.pack does not support {{set}}: {why}",
        fix="leave {key} out, or data.pack",
        why=why,
    )


PLAIN_TOKENS = "only models with plain tokens as input can be divided"
PACK = JobFeature(
    key="data.pack",
    on=lambda config: config.data.pack is not None,
    examples=("data.pack=16 task.name=language",),
    off="data.pack=null",
    is_extra=True,
    words_of_reading=lambda config, recipe, readers: (
        f"packed into rows of {config.data.pack:,} tokens"
    ),
    excludes=(
        Exclusion(
            "task.name",
            Values(
                lambda name: name != "language" and not is_object(name), "regression"
            ),  # a script's loss is checked with its task
            what="data.pack packs tokens for task.name=language, but this is {set}",
            where="data.pack",
            fix="task.name=language, or leave data.pack out",
            why="only tokens can be packed",
        ),
        of_rows(
            "data.pad",
            Values(bool, '{"tokens":0}'),
            "a row contains several sequences, so no single sequence can be padded",
        ),
        of_rows("data.bucket_by", other_than(None, "length"), "all rows have one length"),
        of_rows(
            "data.sample_weights", other_than(None, "balanced"), "a row contains several samples"
        ),
        of_rows(
            "log.noise_scale",
            among(True),
            "the noise scale compares means over samples, but rows contain several",
        ),
    ),
)


BUCKETS = JobFeature(
    key="data.bucket_by",
    on=lambda config: config.data.bucket_by is not None,
    examples=('data.bucket_by=length data.pad={"tokens":0} task.name=language',),
    off="data.bucket_by=null",
    excludes=(
        Exclusion(
            "data.sampling",
            among("partition"),
            what="{chosen} divides the samples of a step by their lengths, but {set} divides them "
            "by their positions",
            fix="data.sampling=global, or leave data.bucket_by out",
            why="the samples of a step are divided by their lengths, not by their positions",
        ),
    ),
    rules=(
        Exclusion(
            "data.pad",
            among({}),
            what="{chosen} groups samples by length, which needs data.pad",
            fix="data.pad={{tokens: 0}}, or leave data.bucket_by out",
            where="data.bucket_by",
            when=lambda config: not config.data.is_of_texts,
        ),
    ),
)
# data.inputs: fields of each sample that the model receives as separate inputs.
INPUTS = JobFeature(
    key="data.inputs",
    on=lambda config: bool(config.data.inputs),
    examples=("data.inputs=[image,table]",),
    off="data.inputs=[]",
    is_extra=True,
)
VAL_SHARE = JobFeature(
    key="data.val_share",
    on=lambda config: config.data.val_share is not None,
    examples=("data.val_share=0.25",),
    off="data.val_share=null",
    excludes=(
        Exclusion(
            "data.shift",
            Values(lambda steps: steps is not None, 1),
            what="{set} makes pairs of samples, and {chosen} draws some of them at random, so a "
            "target of one set would be in the other",
            where="data.val_share",
            fix="data.split_by=NAME with data.split_val=[...] for files of arrays; or a set of its "
            "own: files train and val, or val_data=",
            why="a target of one set would be in the other",
            words="task.name=regression",
        ),
    ),
    words_of_counts=lambda config: f" (data.val_share={config.data.val_share:g} of train)",
)


SHARE = JobFeature(
    key="data.share",
    on=lambda config: config.data.share is not None,
    examples=("data.share=0.5",),
    off="data.share=null",
    words_of_counts=lambda config: f" (data.share={config.data.share:g} of train)",
)


CROP = JobFeature(
    key="augment.crop",
    on=lambda config: config.augment.crop > 0,
    examples=("augment.crop=1",),
    off="augment.crop=0",
    without=options("augment.crop", {"augment.pad": "reflect"}, fix="augment.crop=2"),
    excludes=(
        Exclusion(
            "augment.resized_crop",
            Values(bool, 0.5),
            what="{chosen} and augment.resized_crop={config.augment.resized_crop:g} both crop the "
            "image",
            where="augment.crop",
            fix="keep one of them",
            why="both crop the image",
        ),
    ),
)


RAND_AUGMENT = JobFeature(
    key="augment.rand_augment",
    on=lambda config: config.augment.rand_augment > 0,
    examples=("augment.rand_augment=2",),
    off="augment.rand_augment=0",
    is_extra=True,
    without=options("augment.rand_augment", {"augment.magnitude": 7}, fix="augment.rand_augment=2"),
)
COLOR_JITTER = JobFeature(
    key="augment.color_jitter",
    on=lambda config: bool(config.augment.color_jitter),
    examples=("augment.color_jitter=[0.4,0.4,0.4,0.1]",),
    off="augment.color_jitter=[]",
    is_extra=True,
    rules=(
        Exclusion(
            "augment.color_jitter",
            Values(lambda jitter: max(jitter[3:], default=0) > 0.5, [0.4, 0.4, 0.4, 0.6]),
            what="{key} turns hues by up to {config.augment.color_jitter[3]:g} of the colour "
            "circle, but 0.5 already covers all hues",
            fix="brightness, contrast, saturation, hue: [0.4,0.4,0.4,0.1]",
        ),
    ),
)


# evaluate.views: the model's output for an image is the mean over several views of it.
VIEWS = JobFeature(
    key="evaluate.views",
    on=lambda config: config.evaluate.views > 1,
    examples=("evaluate.views=2",),
    off="evaluate.views=1",
    is_extra=True,
    words_of_counts=lambda config: f", {config.evaluate.views} views of each in an evaluation",
    excludes=(
        Exclusion(
            "task.name",
            other_than("classification", "regression"),
            what="{chosen} needs a classification of images, but the job has {set}",
            where="evaluate.views",
            fix="task.name=classification, or leave it out",
            why="views are averaged only in classification",
        ),
    ),
)
