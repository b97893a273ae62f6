"""The figures of `report`, and of `plan`, `sweep` and `bench scaling`."""
