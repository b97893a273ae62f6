"""The figures of `report`, and the canvas that other commands use for theirs."""
