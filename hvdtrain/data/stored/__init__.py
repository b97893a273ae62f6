"""Arrays and columns in scientific data files (Parquet, CSV, npz, ...) as samples: read a block
at a time, never a file as a whole."""
