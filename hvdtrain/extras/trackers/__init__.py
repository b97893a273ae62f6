"""log.trackers=[mlflow], [wandb]: the metrics of a job in products of others."""
