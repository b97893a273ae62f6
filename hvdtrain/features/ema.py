"""optim.ema: an average of the weights, a part of the optimizer's state, whose parts an evaluation puts together."""

from __future__ import annotations

from hvdtrain.config.plugins import is_dotted
from hvdtrain.features.job_feature import Exclusion, JobFeature, Values, above, among, other_than

EMA = JobFeature(
    key="optim.ema",
    on=lambda config: config.optim.ema is not None,
    examples=("optim.ema=0.8",),
    off="optim.ema=null",
    why="no rank has all averages to evaluate with",
    what="optim.ema does not go with {key}: no rank has all averages to evaluate with",
    fix="leave {key} or optim.ema out",
    excludes=(
        Exclusion(
            "optim.name",
            Values(is_dotted, "torch.optim.Adam"),
            what="optim.ema is of hvdtrain's own optimizers, and {set} has its state to itself",
            where="optim.ema",
            fix="a name of `list` for optim.name, or leave optim.ema out",
            why="a class of torch.optim has its state to itself",
        ),
        Exclusion(
            "shard.stage",
            among(3),
            what="optim.ema does not go with {set}: no rank has all averages to evaluate with",
            where="optim.ema",
            fix="leave {set} or optim.ema out; shard.stage=2 has them",
        ),
        Exclusion("servers.count", above(0), where="optim.ema"),
        Exclusion("parallel.tensor", above(1), where="optim.ema"),
        Exclusion("parallel.pipeline", above(1), where="optim.ema"),
        Exclusion("parallel.dense", other_than("none", "a"), where="optim.ema"),
    ),
    lines_of_recipe=lambda config, recipe, samples: [f"evaluations of averaged weights, optim.ema={config.optim.ema:g}"],
)
FEATURES = (EMA,)
