"""comm.outer_lr and its companions: ranks combine weights after local steps by an outer
optimizer."""

from __future__ import annotations

from hvdtrain.config.exclusion import as_set, default_of, options
from hvdtrain.config.schema import Config
from hvdtrain.extras.diloco.keys import DilocoKeys
from hvdtrain.features import reduce
from hvdtrain.features.job_feature import Conflict, JobFeature
from hvdtrain.features.of_extras import Added

MOST_RANKS = 255  # the sum of more leaves each rank fewer than the 8 bits of a bfloat16
_EXAMPLES = {
    "comm.outer_lr": 0.7,
    "comm.outer_momentum": 0.9,
    "comm.fragments": 2,
    "comm.differences": "int16",
}


def _changed(config: Config) -> list[str]:
    """Returns the keys that differ from their defaults."""
    keys = DilocoKeys.of(config)
    return [key for key in _EXAMPLES if getattr(keys, key.partition(".")[2]) != default_of(key)]


def _has_no_local_steps(config: Config) -> bool:
    return config.comm.local_steps == 1


# Local SGD is on too, and excludes what ranks with their own weights cannot do.
DILOCO = JobFeature(
    key="comm.outer_lr",
    on=lambda config: bool(_changed(config)) and not _has_no_local_steps(config),
    updates_whole_weights=False,
    has_common_steps=False,
    arrangement="hvdtrain.extras.diloco.arrangement:Diloco",
    examples=(
        "comm.outer_momentum=0.9 comm.outer_lr=0.7 comm.local_steps=2",
        "comm.fragments=2 comm.local_steps=2",
        "comm.differences=int16 comm.local_steps=2",
    ),
    chosen=lambda config: as_set(config, _changed(config)[0]),
    off=lambda config: f"without {', '.join(_changed(config))}",
    why="it defines what ranks exchange after local steps",
    without=options(
        "comm.local_steps", _EXAMPLES, fix="comm.local_steps=4", when=_has_no_local_steps
    ),
    rules=(
        Conflict(
            lambda job: DilocoKeys.of(job.config).fragments > job.config.comm.local_steps,
            what="{set} would exchange several fragments in a step of "
            "comm.local_steps={config.comm.local_steps}",
            fix="comm.fragments={config.comm.local_steps} or fewer, or more comm.local_steps",
            key="comm.fragments",
        ),
        Conflict(
            lambda job: job.ranks > MOST_RANKS and DilocoKeys.of(job.config).differences == "int16",
            what="{set} supports " + f"{MOST_RANKS}" + " ranks, but the job has {ranks}: the sum "
            "of more ranks leaves too few bits to each",
            fix="comm.differences=none, or fewer ranks",
            key="comm.differences",
        ),
    ),
)

FEATURES = (Added((DILOCO,), behind=reduce.LOCAL_SGD),)
ROWS = ()
