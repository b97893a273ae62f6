"""data.mixture: several sets of tokens, mixed by weight."""

from __future__ import annotations

from hvdtrain.config.exclusion import Exclusion, Values, above, among, other_than
from hvdtrain.features import data
from hvdtrain.features.job_feature import JobFeature
from hvdtrain.features.of_extras import Added, AddedRows


def _instead(key: str, values: Values, why: str, words: str = "") -> Exclusion:
    return Exclusion(
        key,
        values,
        what=f"{{chosen}} decides which sample comes next and does not support {{set}}: {why}",
        fix="leave {key} out, or data.mixture",
        why=why,
        words=words,
    )


MIXTURE = JobFeature(
    key="data.mixture",
    is_value=True,  # an option of data.name=tokens
    on=lambda config: config.data.options.get("mixture") is not None,
    chosen=lambda config: "data.mixture",
    examples=(
        'data.name=tokens data.mixture={"a":0.7,"b":0.3} data.vocabulary=256 task.name=language',
    ),
    excludes=(
        _instead("data.shuffle", among("blocks"), "each set has a shuffle of its own"),
        _instead("data.sampling", among("partition"), "any rank may read any set"),
        _instead(
            "data.sample_weights", other_than(None, "balanced"), "both say how often a set is read"
        ),
        _instead(
            "recipe.sample_noise",
            above(0),
            "a step may read a sample twice, but would use the same noise for both",
            "optim.base_batch=6",
        ),
    ),
)
FEATURES = (Added((MIXTURE,), behind=data.SAMPLE_WEIGHTS),)
ROWS: tuple[AddedRows, ...] = ()
