"""optim.name=muon: it makes whole matrices orthogonal; where each rank has a part of one, shard.stage of framework=torch alone does it."""

from __future__ import annotations

from hvdtrain.features.job_feature import Exclusion, JobFeature, above, among, other_than

MUON = JobFeature(
    key="optim.name",
    on=lambda config: config.optim.name == "muon",
    examples=("optim.name=muon",),
    off="optim.name=adamw",
    why="it makes whole matrices orthogonal, and no rank has them",
    excludes=(
        Exclusion(
            "shard.stage",
            above(0),
            what="{chosen} does not support {set} in JAX",
            when=lambda config: config.framework == "jax",
            words="framework=jax model.name=mlp",
        ),
        Exclusion("parallel.tensor", above(1)),
        Exclusion("parallel.pipeline", above(1)),
        Exclusion("parallel.dense", other_than("none", "a")),
        Exclusion("servers.count", above(0)),
        Exclusion(
            "framework",
            among("numpy"),
            what="numpy has no bfloat16",
            where="optim.bf16",
            fix="leave optim.bf16 out, or framework=torch",
            when=lambda config: bool(config.optim.options.get("bf16")),
            words="optim.bf16=true model.name=linear",
            why="numpy has no bfloat16",
        ),
    ),
)
FEATURES = (MUON,)
