"""task.name=segmentation: what it excludes."""

from __future__ import annotations

from hvdtrain.config.exclusion import Exclusion, When, above
from hvdtrain.config.schema import Config
from hvdtrain.features.of_extras import Added, AddedRows
from hvdtrain.features.tasks import GAPS, answers, mixes


def _has_only_classes(config: Config) -> bool:
    is_segmentation = config.task.name == "segmentation"
    return is_segmentation and config.task.options.get("ignore_label") is None


def _black_pixels(key: str, without_them: str, when: When) -> Exclusion:
    return Exclusion(
        key,
        above(0),
        what="{set} fills in black pixels from outside the image, which have no class in {chosen}",
        fix=f"task.ignore_label=255 ignores them; or {without_them}",
        when=when,
        why="black pixels from outside have no class; task.ignore_label ignores them",
    )


SEGMENTATION = answers(
    "segmentation",
    mixes(
        "augment.mixup",
        "augment.mixup=0; or augment.cutmix, which pastes boxes of images with their masks",
    ),
    _black_pixels(
        "augment.crop",
        "augment.pad=reflect",
        lambda config: _has_only_classes(config) and config.augment.pad == "zeros",
    ),
    _black_pixels("augment.rand_augment", "augment.rand_augment=0", _has_only_classes),
)

FEATURES = (Added((SEGMENTATION,), behind=GAPS),)
ROWS: tuple[AddedRows, ...] = ()
