"""Stronger augmentation of images: RandAugment, color jitter, erasing; and test-time views."""

from hvdtrain.core.extras import Extra

EXTRA = Extra(
    status="stable",
    says="Augments images by RandAugment, color jitter and erasing; averages outputs over views.",
    implements={
        "augment.rand_augment": "hvdtrain.extras.augmentations.changes",
        "augment.color_jitter": "hvdtrain.extras.augmentations.changes",
        "augment.erase": "hvdtrain.extras.augmentations.changes",
        "evaluate.views": "hvdtrain.extras.augmentations.views",
    },
)
