"""Classes of pixels: the task, its data, and pictures of masks and maps."""
