"""optim.groups: parameters with a rate, a decay or a momentum of their own, by the rules of hvdtrain/optim.

frameworks/by_name.py judges the names, once the model is known.
"""

from __future__ import annotations

from hvdtrain.config.plugins import is_dotted
from hvdtrain.features.job_feature import Exclusion, JobFeature, Values

GROUPS = JobFeature(
    key="optim.groups",
    on=lambda config: bool(config.optim.groups),
    examples=('optim.groups=[{"names":"*.bias","rate":3}]',),
    off="optim.groups=[]",
    excludes=(
        Exclusion(
            "optim.name",
            Values(is_dotted, "torch.optim.SGD"),
            what="optim.groups is of hvdtrain's own optimizers; {config.optim.name} has one rate for all parameters",
            where="optim.groups",
            fix="a name of `list` for optim.name, or leave optim.groups out",
            why="a class of torch.optim has one rate for all parameters",
        ),
    ),
)
FEATURES = (GROUPS,)
