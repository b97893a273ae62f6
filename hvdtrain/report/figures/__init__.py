"""The figures of `report`, and of `plan`, `bench scaling` and extras."""
