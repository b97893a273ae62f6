"""The registration of segmentation and of pictures of masks and maps as an extra."""

from hvdtrain.core.extras import Extra

EXTRA = Extra(
    status="stable",
    says="Predicts the class of each pixel, and shows predicted masks and maps as pictures.",
    maps="hvdtrain.extras.maps",
)
