"""log.trackers=[mlflow], [wandb]: sends the metrics of a job to other products."""

from hvdtrain.core.extras import Extra

EXTRA = Extra(
    status="stable",
    says="Sends the metrics of a job to TensorBoard, MLflow or Weights & Biases.",
)
