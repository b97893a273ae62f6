"""Arrays and columns in scientific data files (Parquet, CSV, npz, ...) as samples. They are read in
blocks, never a whole file at a time."""
