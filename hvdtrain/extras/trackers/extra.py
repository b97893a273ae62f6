"""The registration of these trackers as an extra."""

from hvdtrain.core.extras import Extra

EXTRA = Extra(
    status="stable",
    says="Sends the metrics of a job to TensorBoard, MLflow or Weights & Biases.",
)
