"""What the rest of hvdtrain learns of data.name=webdataset."""

from hvdtrain.core.extras import Extra

EXTRA = Extra(
    status="stable",
    says="Trains on images in WebDataset's tar archives, which are read in place.",
    image_files=("webdataset",),
)
