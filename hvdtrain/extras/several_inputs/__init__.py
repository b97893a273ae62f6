"""Tasks whose model is called with several fields of a sample."""
