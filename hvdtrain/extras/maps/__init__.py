"""Classes of pixels: the task, its data, and pictures of masks and maps."""

from hvdtrain.core.extras import Extra

EXTRA = Extra(
    status="stable",
    says="Predicts the class of each pixel, and shows predicted masks and maps as pictures.",
    needs=("image_files",),
    maps="hvdtrain.extras.maps",
)
