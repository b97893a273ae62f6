"""HDF5, netCDF-4 and Zarr files as data sets: chunks are located once, and read when one of their
samples is needed."""
