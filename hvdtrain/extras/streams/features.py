"""data.epoch_samples: the training samples come from a stream."""

from __future__ import annotations

from hvdtrain.config.exclusion import Exclusion, Values, above, among, options, other_than
from hvdtrain.config.plugins import is_users_own
from hvdtrain.config.schema import Config
from hvdtrain.extras.streams.keys import StreamKeys
from hvdtrain.features import data
from hvdtrain.features.job_feature import Conflict, JobFeature
from hvdtrain.features.of_extras import Added, AddedRows


def is_stream(config: Config) -> bool:
    return StreamKeys.of(config).epoch_samples is not None


def _not(key: str, values: Values, why: str, words: str = "") -> Exclusion:
    return Exclusion(
        key,
        values,
        what=f"data.epoch_samples reads a stream and does not support {{set}}: {why}",
        fix="leave {key} out",
        why=why,
        words=words,
    )


COUNTED = Values(bool, 2)  # neither none nor 0
ALL_SAMPLES = "it needs all samples, and a stream has only the next one"
NEXT_SAMPLE = "a stream only gives its next sample"
STREAM = JobFeature(
    key="data.epoch_samples",
    on=is_stream,
    examples=(
        "data.epoch_samples=36 data.name=mine:stream",
        "data.epoch_samples=36 data.name=mine:stream data.shuffle_buffer=8",
    ),
    chosen=lambda config: "data.epoch_samples",
    off="give data that can be read in any order",
    own_loop="hvdtrain.train(), whose checkpoints know the position in the stream",
    without=options(
        "data.epoch_samples", {"data.shuffle_buffer": 8}, fix="data.epoch_samples=10000"
    ),
    excludes=(
        _not("data.shuffle", among("blocks"), "data.shuffle_buffer shuffles it"),
        _not(
            "data.sampling",
            among("partition"),
            "every rank reads the stream in its order and keeps its share of each step",
        ),
        _not("data.sample_weights", other_than(None, "balanced"), NEXT_SAMPLE),
        _not("data.val_share", other_than(None, 0.25), ALL_SAMPLES),
        _not("data.share", other_than(None, 0.5), ALL_SAMPLES),
        _not(
            "data.pad",
            Values(bool, '{"tokens":0}'),
            "the longest sample of a stream is not known; cut or pad the samples in the stream",
            "task.name=language",
        ),
        _not(
            "data.pack",
            other_than(None, 24),
            "the lengths of a stream are not known; yield packed rows",
            "task.name=language",
        ),
        _not("data.bucket_by", other_than(None, "length"), "lengths are not known in advance"),
        _not("data.shift", other_than(None, 1), NEXT_SAMPLE),
        _not("data.gaps", other_than([], ["y"]), "gaps are for arrays"),
        _not("data.stage", other_than(None, "local"), "it copies files of hvdtrain's data sets"),
        _not("data.readers", COUNTED, "one thread reads the stream ahead"),
        _not("data.ahead", other_than(None, 2), "one thread reads the stream ahead"),
        _not("data.workers", COUNTED, "one thread reads the stream, in its order"),
        _not("data.resident", among(True), ALL_SAMPLES),
        _not(
            "augment.flip",
            among("alternating"),
            "it flips a sample in every other epoch, and the next epoch has other samples",
        ),
        _not("augment.mixup", above(0), "partners are other samples of the data"),
        _not("augment.cutmix", above(0), "partners are other samples of the data"),
    ),
    rules=(
        Conflict(
            lambda job: not is_users_own(job.config.data),
            what="data.epoch_samples is for streams, but data.name={config.data.name} can be read "
            "in any order",
            fix="leave data.epoch_samples out; or data.name=package.module:function that returns a "
            "stream",
        ),
    ),
)

FEATURES = (Added((STREAM,), behind=data.BLOCKS),)
ROWS: tuple[AddedRows, ...] = ()
