"""Tasks of maps."""
