"""log.trust_ratios: the factor of each layer's learning rate."""

from __future__ import annotations

from hvdtrain.config.exclusion import Exclusion, above, other_than
from hvdtrain.extras.trust_ratios.keys import TrustRatioKeys
from hvdtrain.features import log
from hvdtrain.features.job_feature import Conflict, JobFeature
from hvdtrain.features.of_extras import Added, AddedRows

TRUST_RATIOS = JobFeature(
    key="log.trust_ratios",
    on=lambda config: TrustRatioKeys.of(config).trust_ratios,
    gauge="hvdtrain.extras.trust_ratios.gauge:trust_ratio_gauge",
    examples=("log.trust_ratios=true optim.name=lamb",),
    off="log.trust_ratios=false",
    why="it reads the trust ratios of torch's optimizer on this rank",
    excludes=(
        Exclusion("framework", other_than("torch", "jax"), why="not implemented yet"),
        Exclusion("servers.count", above(0), why="the servers update the weights"),
        Exclusion("parallel.dense", other_than("none", "a"), why="not implemented yet"),
    ),
    rules=(
        Conflict(
            lambda job: job.config.optim.name not in ("lars", "larc", "lamb"),
            what="optim.name={config.optim.name} has no trust ratios, which {chosen} records",
            fix="optim.name=lars, larc or lamb, or {off}",
        ),
    ),
)

FEATURES = (Added((TRUST_RATIOS,), behind=log.NOISE_SCALE),)
ROWS: tuple[AddedRows, ...] = ()
