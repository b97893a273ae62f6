"""parallel.tensor: ranks compute each layer together. parallel.sequence: between the divided
layers, each rank has its part of the positions."""

from __future__ import annotations

from dataclasses import replace

from hvdtrain.config.exclusion import Exclusion, above, among
from hvdtrain.extras.divided.features import SHARED_MODEL
from hvdtrain.extras.tensor.keys import TensorKeys
from hvdtrain.features import data, frameworks, lost, optim, shards
from hvdtrain.features.job_feature import JobFeature
from hvdtrain.features.of_extras import Added, AddedRows

SEQUENCE = JobFeature(
    key="parallel.sequence",
    on=lambda config: TensorKeys.of(config).sequence,
    examples=("parallel.sequence=true parallel.tensor=2",),
    off="parallel.sequence=false",
    rules=(
        Exclusion(
            "parallel.tensor",
            among(1),
            what="{chosen} divides positions over the ranks of a tensor group, but this is {set}",
            fix="parallel.tensor=2, or parallel.sequence=false",
            where="parallel.sequence",
        ),
    ),
)
DIVISION = "hvdtrain.extras.tensor.division:TensorLayers"
# also for the other ways to share one model, whose names follow its own
TENSOR = replace(
    SHARED_MODEL,
    key="parallel.tensor",
    keys_of_custom_loops=("parallel.tensor", "parallel.sequence"),
    examples=("parallel.tensor=2",),
    layer_division=lambda config: DIVISION if config.parallel.part_ranks > 1 else "",
)

FEATURES = (Added((SEQUENCE, TENSOR), behind=shards.SHARDS),)

_KEY = "parallel.tensor"
_ANY = above(1)
ROWS = (
    AddedRows(
        (frameworks.JAX, frameworks.NUMPY, frameworks.KERAS),
        frameworks.excluded(
            {
                _KEY: frameworks.Supported((1,), 2),
                "parallel.sequence": frameworks.Supported((False,), True),
            }
        ),
        behind="comm.reduce",
    ),
    AddedRows((optim.MUON,), (Exclusion(_KEY, _ANY),), behind="shard.stage"),
    AddedRows((optim.EMA,), (Exclusion(_KEY, _ANY, where="optim.ema"),), behind="servers.count"),
    AddedRows(
        (optim.LORA,),
        (
            Exclusion(
                _KEY,
                _ANY,
                what="model.lora does not support {set}: an adapter needs the whole inputs and "
                "outputs of its layer on each rank",
                where="model.lora",
                why="an adapter needs the whole inputs and outputs of its layer on each rank",
            ),
        ),
        behind="servers.count",
    ),
    AddedRows(
        (data.PAD, data.TEXTS),
        (Exclusion("parallel.sequence", among(True), words="parallel.tensor=2"),),
        behind="parallel.pipeline",
    ),
    AddedRows(
        (data.PACK,), (data.of_rows(_KEY, _ANY, data.PLAIN_TOKENS),), behind="data.sample_weights"
    ),
    AddedRows((lost.SHRINK,), (lost.fewer_ranks(_KEY, _ANY),)),
)
