"""The section data: the data set, and how its samples reach the ranks."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from hvdtrain.config.sections.extra_keys import with_keys_of_extras
from hvdtrain.config.sections.section import OpenSection
from hvdtrain.core.extras import data_files


@with_keys_of_extras
class DataConfig(OpenSection):
    """The data set, and how samples reach the ranks."""

    section = "data"
    name: str = Field(
        default="digits",
        description="data set: digits (embedded), mnist, fashion_mnist, kmnist, cifar10, "
        "cifar100, folder, webdataset, synthetic, "
        "image_tokens, text; files of science: "
        f"{', '.join(dict.fromkeys([*data_files().values(), 'parquet', 'csv', 'npz']))}; or "
        "package.module:function of your own",
    )
    root: str | None = Field(
        default=None, description="folder that holds the data; default: the data set's own"
    )
    stage: str | None = Field(
        default=None,
        description="folder on a local disk of each node: one rank per node copies the data there "
        "and verifies it, and every rank "
        "of the node reads the copy",
    )
    val_share: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="share of the training set that validates instead of the data set's own "
        "validation set: of each class this share "
        "of its samples, the same ones in every run",
    )
    mean: list[float] = Field(
        default_factory=list,
        description="mean of each channel of images, of pixels / 255, in place of the training "
        "set's: that of the images that "
        "model.weights were trained with: [0.485,0.456,0.406]",
    )
    std: list[float] = Field(
        default_factory=list,
        description="deviation of each channel, with data.mean: [0.229,0.224,0.225]",
    )
    inputs: list[str] = Field(
        default_factory=list,
        description="fields of the data that a model of your own gets, by the names of its "
        "forward()'s parameters, else as a dict: "
        "[image,table]; default: those that forward() has required parameters for, or x",
    )
    pad: dict[str, float] = Field(
        default_factory=dict,
        description="fields whose samples have different lengths, and what stands behind the "
        "shorter ones of a pass, which are padded to "
        "its longest: {tokens: 0}; a field tokens_mask tells which are real (framework=torch; "
        "data of your own)",
    )
    mask: dict[str, str] = Field(
        default_factory=dict, description="other names for the masks of data.pad: {tokens: mask}"
    )
    bucket_by: str | None = Field(
        default=None,
        description="length: of the samples of a step those of similar length come into one pass; "
        "or another field of data.pad, whose "
        "lengths count; default: they come in the order of the shuffle",
    )
    pack: int | None = Field(
        default=None,
        ge=2,
        le=2**26,
        description="rows of so many tokens, the samples of the job, into which the sequences of "
        "the field tokens are packed "
        "(task.name=language, framework=torch; data of your own)",
    )
    class_names: list[str] | None = Field(
        default=None,
        description="name of each class, by label; default: the data set's own (a job records "
        "them in config.yaml)",
    )
    sampling: Literal["global", "partition"] = Field(
        default="global",
        description="global: each rank reads its slice of every global batch; "
        "partition: each epoch's shuffled samples are divided among the ranks first",
    )
    shuffle: Literal["full", "blocks"] = Field(
        default="full",
        description="full: one shuffle of all samples for each epoch; blocks: blocks of "
        "neighbouring samples are shuffled, and the samples "
        "of each data.shuffle_window of them: for files whose samples are slow to read one by one",
    )
    shuffle_block: int | None = Field(
        default=None,
        ge=1,
        le=2**40,
        description="samples of a block; default: those that the files have in a chunk or row "
        "group, else 256",
    )
    shuffle_window: int = Field(
        default=16, ge=1, le=2**20, description="blocks whose samples are shuffled among each other"
    )
    sample_weights: str | None = Field(
        default=None,
        description="draw samples with replacement, in proportion to a field of theirs, as "
        "`weight`; balanced: by the inverse frequency of "
        "their class y; default: each sample once in an epoch",
    )
    resident: bool | None = Field(
        default=None,
        description="keep the training set on the device; default: on a GPU with four times the "
        "room",
    )
    ahead: int | None = Field(
        default=None,
        ge=0,
        le=1000,
        description="steps prefetched during training; default: one per reader, at least 2, and 0 "
        "for data that is in memory",
    )
    readers: int | None = Field(
        default=None,
        ge=1,
        le=1024,
        description="threads that read and decode for this rank; default: its share of the cores, "
        "at most 8",
    )
    workers: int | None = Field(
        default=None,
        ge=0,
        le=1024,
        description="processes that read for this rank and each set: image files with "
        "data.packed=false and files of science, by default 0 "
        "(threads decode); "
        "a torch Dataset of your own, by default num_workers of its DataLoader, else 0 (the rank "
        "reads its samples itself, between steps)",
    )
