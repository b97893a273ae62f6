"""Images of another data set as sequences of tokens: the numbers of few colours, which k-means
finds."""

from __future__ import annotations

from pathlib import Path

from hvdtrain.config import plugins
from hvdtrain.config.sections.data import DataConfig
from hvdtrain.data.files.selection import Staging
from hvdtrain.data.option_error import OptionError
from hvdtrain.data.source import LabelledImages, Split
from hvdtrain.errors import UserError
from hvdtrain.extras.image_tokens.codebook import Codebook, read_codebook
from hvdtrain.extras.image_tokens.images import UnencodedImages

STAGING = Staging(is_read_once=True)


def build(
    name: str,
    root: Path | None,
    split: Split,
    *,
    source: str = "digits",
    source_options: dict[str, bool | int | float | str | list[int]] | None = None,
    side: int | None = None,
    colours: int = 16,
) -> UnencodedImages:
    """Returns the images of data.source for task.name=language: windows of side^2 + 1 tokens, a
    start token followed by the pixels row by row.

    The codebook (Chen et al. 2020, "Generative Pretraining from Pixels", 3.2) is computed from
    65,536 pixels that counters draw from the training images. Rank 0 computes and broadcasts it,
    and the run folder keeps it as codebook.json.

    source: the data set whose images are read, as data.name would name it
    source_options: its options, as in {size: 32}
    side: height and width; images are reduced by the means of squares of pixels (none: as they are)
    colours: tokens of the codebook, 2 to 32768

    Raises UserError if the other data set does, and for a side that does not divide the images'
    own.
    """
    if source == name or plugins.is_dotted(source):
        raise OptionError(
            f"data.source={source} is not a data set of images",
            "source",
            "cifar10, digits, folder, ...",
        )
    if own := sorted(DataConfig.model_fields.keys() & (source_options or {}).keys()):
        raise OptionError(
            f"{own[0]} is a key of data, not an option of data.source={source}",
            "source_options",
            f"data.{own[0]}=...",
        )
    options = plugins.convert_options(
        DataConfig.model_validate({"name": source} | (source_options or {})), "data/datasets"
    )
    build = plugins.load("data/datasets", source, "data.source").build
    try:
        images = build(source, root, split, **options)
    except OptionError as error:
        of_source = {"name": "source", "root": "root"}.get(error.where, "source_options")
        raise OptionError(error.what, of_source, error.fix) from None
    if not isinstance(images, LabelledImages):
        raise OptionError(
            f"data.source={source} has no images", "source", "cifar10, digits, folder, ..."
        )
    return UnencodedImages(images, side, colours)


def read_pictures(run: Path, values: int) -> Codebook:
    """Returns how to display the tokens of a run whose model has `values` pixel tokens. Raises
    UserError if the run folder's codebook is absent, damaged or different."""
    codebook = read_codebook(run)
    if codebook.values != values:
        what = f"the codebook has {codebook.values} colours, but the model has {values}"
        raise UserError(what, str(run), "restore codebook.json from a copy of the run folder")
    return codebook
