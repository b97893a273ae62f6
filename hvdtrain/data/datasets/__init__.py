"""The data sets that data.name knows: one file each."""
