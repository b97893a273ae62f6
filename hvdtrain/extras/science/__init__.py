"""HDF5, netCDF-4 and Zarr files as data sets: chunks are located once, and read when one of their
samples is needed."""

from hvdtrain.core.extras import Extra

EXTRA = Extra(
    status="stable",
    says="Trains on CSV, Parquet, npz, HDF5, netCDF-4 and Zarr files, one block at a time.",
    needs=("split_files",),
    aliases={"data/datasets": {"hdf5": "hdf5", "netcdf": "hdf5"}},
    data_files={
        ".h5": "hdf5",
        ".hdf5": "hdf5",
        ".nc": "netcdf",
        ".nc4": "netcdf",
        ".zarr": "zarr",
    },
    tables={".parquet": "parquet", ".csv": "csv", ".tsv": "csv"},
    archives={".npz": "npz"},
    number_files={
        ".csv": "hvdtrain.extras.science.user_tables.predicted_table",
        ".npz": "hvdtrain.extras.science.data.datasets.npz",
    },
    map_files={
        ".nc": "hvdtrain.extras.science.map_file",
        ".zarr": "hvdtrain.extras.science.map_file",
    },
    column_encoder="hvdtrain.extras.science.user_tables.column_encoder",
)
