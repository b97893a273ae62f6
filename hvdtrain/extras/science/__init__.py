"""Files of HDF5, netCDF-4 and Zarr as data sets: chunks are found once, then read when a sample of
them is."""
