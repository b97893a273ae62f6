"""parallel.pipeline: ranks have consecutive layers of one model; the schedule of their
micro-batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from hvdtrain.config.exclusion import Exclusion, Values, above, among, as_yaml, options, other_than
from hvdtrain.config.schema import known_keys
from hvdtrain.errors import UserError
from hvdtrain.extras.divided.features import SHARED_MODEL
from hvdtrain.extras.pipeline.keys import PipelineKeys
from hvdtrain.features import data, frameworks, lost, optim, shards
from hvdtrain.features.comm import not_on_horovod
from hvdtrain.features.job_feature import Conflict, JobFeature, PlannedJob, needs_engine
from hvdtrain.features.of_extras import Added, AddedRows


def _stages_of_balance(job: PlannedJob) -> Iterator[UserError]:
    parallel = PipelineKeys.of(job.config)
    stages = parallel.pipeline * parallel.stages_of_rank
    if isinstance(parallel.balance, list) and len(parallel.balance) != stages:
        given = len(parallel.balance)
        what = (
            f"parallel.balance={as_yaml(parallel.balance)} has {given} "
            f"stage{'s' if given != 1 else ''}, but the pipeline has {stages}"
        )
        yield UserError(
            what,
            job.where("parallel.balance"),
            f"{stages} numbers of units: hvdtrain plan --pipeline shows them",
        )


PIPELINE = JobFeature(
    key="parallel.pipeline",
    on=lambda config: PipelineKeys.of(config).has_stages,
    keys_of_custom_loops=tuple(
        f"parallel.{name}" for name in ("pipeline", "schedule", "virtual", "balance")
    ),
    arrangement="hvdtrain.extras.pipeline.arrangement:PipelineStages",
    gauge="hvdtrain.extras.pipeline.gauge:pipeline_gauge",
    event_fields=("bubble", "bubble_predicted"),
    examples=(
        *("parallel.pipeline=2", "parallel.pipeline=2 parallel.schedule=gpipe"),
        *(
            "parallel.pipeline=2 parallel.schedule=interleaved",
            "parallel.pipeline=2 parallel.schedule=zero_bubble",
        ),
    ),
    off="parallel.pipeline=1",
    why="no rank has the whole model",
    what="{chosen} does not support {set}: no rank has the whole model",
    without=options(
        "parallel.pipeline",
        {
            "parallel.schedule": "gpipe",
            "parallel.virtual": 2,
            "parallel.micro_batches": 4,
            "parallel.balance": "3,2",
        },
        fix="parallel.pipeline=2",
    ),
    first=(
        Exclusion(
            "parallel.virtual",
            among(1),
            what="parallel.schedule=interleaved with {set} has one stage on each rank, which is "
            "1f1b",
            fix="parallel.virtual=2, or parallel.schedule=1f1b",
            when=lambda config: PipelineKeys.of(config).schedule == "interleaved",
        ),
        Conflict(
            lambda job: (
                PipelineKeys.of(job.config).schedule != "interleaved"
                and job.config.parallel.stages_of_rank > 1
            ),
            what="parallel.schedule={config.parallel.schedule} has one stage on each rank, but "
            "{set} asks for more",
            fix="parallel.schedule=interleaved, or leave {key} out",
            key="parallel.virtual",
        ),
        _stages_of_balance,
    ),
    excludes=(
        Exclusion(
            "model.recompute",
            other_than("none", "all"),
            what="zero_bubble runs two backward passes through each stage, which would recompute "
            "its blocks twice with {set}",
            fix="parallel.schedule=1f1b, or model.recompute=none",
            when=lambda config: PipelineKeys.of(config).schedule == "zero_bubble",
            words="parallel.schedule=zero_bubble",
            why="it runs two backward passes through each stage, which would recompute its blocks "
            "twice",
        ),
        Exclusion(
            "batch.micro",
            other_than(None, 8),
            what="parallel.micro_batches={config.parallel.micro_batches} and {set} both set how "
            "many micro-batches a step has",
            fix="leave one of them out",
            when=lambda config: bool(PipelineKeys.of(config).micro_batches),
            words="parallel.micro_batches=4",
            why="both set how many micro-batches a step has",
        ),
        Exclusion(
            "batch.micro",
            among("auto"),
            what="{chosen} does not support {set}: the fewest passes that fit leave stages idle",
            fix="parallel.micro_batches=8, or batch.micro=N; plan --memory shows what fits",
            why="the fewest passes that fit leave stages idle",
        ),
        Exclusion("shard.stage", among(3), fix="shard.stage=1 or 2; or {off}"),
        Exclusion(
            "log.samples",
            Values(bool, 1),
            fix="log.samples=0, and `hvdtrain sample RUN` with its checkpoints; or {off}",
            words="task.name=language data.name=text",
        ),
        *not_on_horovod(
            keys=("comm.cycle_ms", "comm.fusion_mb")
        ),  # mesh.py excludes comm.hierarchical
    ),
    rules=(
        needs_engine(
            "p2p",
            what="{chosen} needs sends between ranks, which the {engine} engine does not support",
            fix="comm.engine=mpi with the same mpirun, or comm.engine=torchdist",
            key="comm.engine",
        ),
    ),
)

# what all ways to share one model have in common; parallel.tensor has it for all of them
_SHARED = replace(
    SHARED_MODEL,
    key="parallel.pipeline",
    is_value=True,
    examples=("parallel.pipeline=2 parallel.micro_batches=2",),
)
FEATURES = (
    Added(() if "parallel.tensor" in known_keys() else (_SHARED,), behind=shards.SHARDS),
    Added((PIPELINE,), before=optim.MUON),
)

_KEY = "parallel.pipeline"
_ANY = above(1)
ROWS = (
    AddedRows(
        (frameworks.JAX, frameworks.NUMPY, frameworks.KERAS),
        frameworks.excluded({_KEY: frameworks.Supported((1,), 2)}),
        behind="parallel.dense_updates",
    ),
    AddedRows((optim.MUON,), (Exclusion(_KEY, _ANY),), behind="parallel.tensor"),
    AddedRows((optim.EMA,), (Exclusion(_KEY, _ANY, where="optim.ema"),), behind="parallel.tensor"),
    AddedRows((data.PAD, data.TEXTS), (Exclusion(_KEY, _ANY),)),
    AddedRows(
        (data.PACK,), (data.of_rows(_KEY, _ANY, data.PLAIN_TOKENS),), behind="parallel.tensor"
    ),
    AddedRows(
        (data.VIEWS,),
        (
            Exclusion(
                _KEY,
                _ANY,
                what="{chosen} averages the outputs of several passes, which {set} does not keep",
                where="evaluate.views",
                fix="evaluate.views=1, and `evaluate RUN evaluate.views=6` afterwards",
                why="a pipeline does not keep the outputs of several passes",
            ),
        ),
        behind="task.name",
    ),
    AddedRows((lost.SHRINK,), (lost.fewer_ranks(_KEY, _ANY),), behind="parallel.tensor"),
)
