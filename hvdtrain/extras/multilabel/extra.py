"""The registration of task.name=multilabel as an extra."""

from hvdtrain.core.extras import Extra

EXTRA = Extra(status="stable", says="Predicts several labels for each sample.")
