"""WebDataset's tar archives of images as data sets: the places of the images are found once, then
each image is read when a sample of it is."""

from hvdtrain.core.extras import Extra

EXTRA = Extra(
    status="stable",
    says="Trains on images in WebDataset's tar archives, which are read in place.",
    needs=("image_files",),
    image_files=("webdataset",),
)
