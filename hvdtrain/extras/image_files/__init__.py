"""data.name=folder: images in files, with a folder for each class, and what other image data
sets need."""

from hvdtrain.core.extras import Extra

EXTRA = Extra(
    status="stable",
    says="Trains on images in files, with a folder for each class; decodes them once.",
    image_files=("folder",),
)
