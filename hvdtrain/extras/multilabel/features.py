"""task.name=multilabel: what it excludes."""

from __future__ import annotations

from hvdtrain.features.of_extras import Added, AddedRows
from hvdtrain.features.tasks import GAPS, answers, mixes

MULTILABEL = answers(
    "multilabel",
    mixes("augment.mixup", "augment.mixup=0"),
    mixes("augment.cutmix", "augment.cutmix=0"),
)

FEATURES = (Added((MULTILABEL,), behind=GAPS),)
ROWS: tuple[AddedRows, ...] = ()
