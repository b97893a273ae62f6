"""What is learned, whatever the framework: the fields of a sample, the loss, and the metrics. One file or folder for each task."""
