"""The figures of `report`, and of commands."""
