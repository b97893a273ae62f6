"""parallel.dense and parallel.dense_updates: each rank has a part of the dense layers, which may be
updated several times in a step."""

from __future__ import annotations

from hvdtrain.config.exclusion import Exclusion, Values, above, among, no_effect, other_than
from hvdtrain.config.plugins import is_dotted
from hvdtrain.config.schema import Config
from hvdtrain.extras.dense.keys import DenseKeys
from hvdtrain.extras.divided.features import GAUGE
from hvdtrain.features import data, frameworks, lost, optim, shards, tasks
from hvdtrain.features.job_feature import Conflict, JobFeature
from hvdtrain.features.of_extras import Added, AddedRows


def _is_on(config: Config) -> bool:
    return DenseKeys.of(config).dense != "none"


# Each rank has the owner's part of all other training state (ZeRO stage 1 or 2).
DENSE = JobFeature(
    key="parallel.dense",
    keys_of_custom_loops=("parallel.dense",),
    arrangement="hvdtrain.extras.dense.arrangement:Dense",
    gauge=GAUGE,
    on=_is_on,
    examples=("parallel.dense=a", "parallel.dense=b", "parallel.dense=c"),
    off="parallel.dense=none",
    why="a rank has gradients of its part of the dense layers for all samples",
    excludes=(
        *(
            Exclusion(
                key,
                above(1),
                what="{chosen} and {mesh} both divide layers: parallel.dense over all ranks",
                where="parallel.dense",
                fix="keep one of them",
                why="both divide layers over all ranks",
            )
            for key in ("parallel.tensor", "parallel.pipeline")
        ),
        Exclusion(
            "shard.stage",
            among(3),
            what="{chosen} keeps whole convolutions on every rank, which {set} would divide",
            fix="shard.stage=2, or parallel.dense=none",
            why="every rank keeps whole convolutions",
        ),
        Exclusion("comm.op", among("adasum")),
        Exclusion("comm.local_steps", above(1)),
        Exclusion("comm.compression", other_than("none", "fp16")),
        Exclusion("comm.reduce", among("ddp", "distributed_optimizer", "bucket")),
        Exclusion("comm.tune", among(True), why="not implemented yet"),
        Exclusion("shard.group", other_than("all", "node"), words="shard.stage=1"),
        Exclusion(
            "shard.offload",
            other_than("none", "optimizer"),
            words="shard.stage=1",
            why="not implemented yet",
        ),
        Exclusion("norm.kind", among("sync")),
        Exclusion("model.recompute", other_than("none", "all"), why="not implemented yet"),
        Exclusion("log.noise_scale", among(True)),
        Exclusion("speed.compile", other_than("none", "default"), why="not implemented yet"),
    ),
)


# parallel.dense_updates: several updates of the dense part in a step. Each sample belongs to one
# turn, which its position determines.
DENSE_UPDATES = JobFeature(
    key="parallel.dense_updates",
    on=lambda config: (
        DenseKeys.of(config).dense != "none" and DenseKeys.of(config).dense_updates > 1
    ),
    examples=("parallel.dense_updates=2 parallel.dense=c",),
    off="parallel.dense_updates=1",
    why="the dense part is updated several times in a step, the convolutions once",
    without=(
        no_effect(
            "parallel.dense_updates",
            above(1),
            without="parallel.dense=b or c",
            when=lambda config: not _is_on(config),
        ),
    ),
    first=(
        Exclusion(
            "parallel.dense",
            among("a"),
            what="{chosen} needs turns, but {set} puts all samples into one",
            fix="parallel.dense=c or b",
            where="parallel.dense_updates",
        ),
        Conflict(
            lambda job: job.config.batch.size < DenseKeys.of(job.config).dense_updates,
            what="batch {config.batch.size} does not split into the turns of {chosen}: some would "
            "have no sample",
            fix="parallel.dense_updates={config.batch.size} or fewer",
        ),
    ),
    excludes=(
        Exclusion(
            "optim.name",
            Values(is_dotted, "torch.optim.SGD"),
            what="{chosen} updates some of the parameters separately; it is unknown whether "
            "{config.optim.name} counts its steps correctly",
            fix="an optimizer of hvdtrain: sgd, adam, lars ...; or parallel.dense_updates=1",
            why="it is unknown whether a class counts its steps correctly",
        ),
        Exclusion("batch.micro", other_than(None, 8)),
        Exclusion(
            "recipe.growth",
            other_than("none", "milestones"),
            words="recipe.grow_at=[1] recipe.grow_to=[512]",
        ),  # micro-batches
        Exclusion("recipe.gradient_noise", Values(lambda eta: eta > 0, 0.01)),
        Exclusion("data.sampling", other_than("global", "partition")),
    ),
)

FEATURES = (Added((DENSE, DENSE_UPDATES), behind=shards.SHARDS),)

_KEY = "parallel.dense"
_ANY = other_than("none", "a")
ROWS = (
    AddedRows(
        (frameworks.JAX, frameworks.NUMPY, frameworks.KERAS),
        frameworks.excluded(
            {
                _KEY: frameworks.Supported(("none",), "a"),
                "parallel.dense_updates": frameworks.Supported((1,), 2),
            }
        ),
        behind="parallel.sequence",
    ),
    AddedRows((optim.MUON,), (Exclusion(_KEY, _ANY),), behind="parallel.tensor"),
    AddedRows((optim.EMA,), (Exclusion(_KEY, _ANY, where="optim.ema"),), "parallel.tensor"),
    AddedRows((optim.THAW,), (Exclusion(_KEY, _ANY, where="model.thaw"),), "comm.local_steps"),
    AddedRows((optim.LORA,), (Exclusion(_KEY, _ANY, where="model.lora"),), "parallel.tensor"),
    AddedRows((data.PAD,), (Exclusion(_KEY, _ANY),), behind="parallel.sequence"),
    AddedRows(
        (data.PACK,),
        (data.of_rows(_KEY, _ANY, data.PLAIN_TOKENS),),
        behind="parallel.tensor",
    ),
    AddedRows((lost.SHRINK,), (lost.fewer_ranks(_KEY, _ANY),), behind="parallel.tensor"),
    AddedRows(
        (tasks.IGNORED_LABEL,),
        (
            Exclusion(
                "parallel.dense_updates",
                above(1),
                what="{set} needs the weight of each turn, but with task.ignore_label samples do "
                "not all have the same weight",
                fix="parallel.dense_updates=1, or leave task.ignore_label out",
                words="parallel.dense=c",
                why="the weight of a turn is not known",
            ),
        ),
        behind="log.noise_scale",
    ),
    AddedRows(
        (tasks.GAPS,),
        (
            Exclusion(
                "parallel.dense_updates",
                above(1),
                what="{set} needs the weight of each turn, but with data.gaps samples do not all "
                "have the same weight",
                fix="parallel.dense_updates=1, or leave data.gaps out",
                when=lambda config: "y" in config.data.gaps,
                words="parallel.dense=c",
                why="the weight of a turn is not known",
            ),
        ),
        behind="log.noise_scale",
    ),
)
