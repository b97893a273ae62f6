"""The figures of `report`, `plan` and `bench scaling`."""
