"""The figures of `report`, and the canvas of those of commands."""
