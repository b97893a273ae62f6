"""Arrays and columns in files of science (Parquet, CSV, npz, ...) as samples: read a block
at a time, never a file as a whole."""
