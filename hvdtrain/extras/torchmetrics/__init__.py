"""Metrics of torchmetrics, computed over all ranks."""

from hvdtrain.core.extras import Extra

EXTRA = Extra(
    status="stable",
    says="Computes metrics of torchmetrics over all ranks: `hvdtrain.train(metrics=...)`.",
    library_metrics="hvdtrain.extras.torchmetrics.library_metrics",
)
