"""The model of a run, for commands and functions that use it without training: evaluate, predict,
sample, export and landscape."""
