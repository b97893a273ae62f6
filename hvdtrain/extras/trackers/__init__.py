"""log.trackers=[mlflow], [wandb]: sends the metrics of a job to other products."""
