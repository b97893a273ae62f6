"""Several labels of a sample: the task and its part in torch."""

from hvdtrain.core.extras import Extra

EXTRA = Extra(status="stable", says="Predicts several labels for each sample.")
