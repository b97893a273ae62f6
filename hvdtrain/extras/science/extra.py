"""What the rest of hvdtrain learns of the files of HDF5 and Zarr."""

from hvdtrain.core.extras import Extra

EXTRA = Extra(
    status="stable",
    says="Trains on HDF5, netCDF-4 and Zarr files, one block at a time.",
    aliases={"data/datasets": {"hdf5": "hdf5", "netcdf": "hdf5"}},
    data_files={
        ".h5": "hdf5",
        ".hdf5": "hdf5",
        ".nc": "netcdf",
        ".nc4": "netcdf",
        ".zarr": "zarr",
    },
    map_files={
        ".nc": "hvdtrain.extras.science.write_netcdf",
        ".zarr": "hvdtrain.extras.science.write_zarr",
    },
)
