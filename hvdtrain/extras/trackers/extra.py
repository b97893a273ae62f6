"""What the rest of hvdtrain learns of these trackers: their names are those of their files."""

from hvdtrain.core.extras import Extra

EXTRA = Extra(status="stable", says="Sends the metrics of a job to MLflow or Weights & Biases.")
