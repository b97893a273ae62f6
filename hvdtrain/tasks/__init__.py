"""Tasks, independent of the framework: the fields of a sample, the loss and the metrics. One file
for each task."""
