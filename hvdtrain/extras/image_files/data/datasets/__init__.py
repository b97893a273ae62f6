"""The data sets that data.name selects: one file each."""
