"""What is learned, whatever the framework: the fields of a sample, the loss, and the metrics. A
file for each task."""
