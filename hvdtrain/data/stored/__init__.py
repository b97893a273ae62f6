"""Arrays and columns in files of science (HDF5, Zarr, Parquet, CSV, npz) as samples: read a block
at a time, never a file as a whole."""
