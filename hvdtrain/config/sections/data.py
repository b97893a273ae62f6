"""The section data: the data set, and how its samples reach the ranks."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from hvdtrain.config.sections.extra_keys import with_keys_of_extras
from hvdtrain.config.sections.section import OpenSection, Owners
from hvdtrain.core.extras import (
    archives,
    data_files,
    document_files,
    image_files,
    tables,
    token_images,
)

_SCIENTIFIC = dict.fromkeys(
    name for files in (data_files(), tables(), archives()) for name in files.values()
)


@with_keys_of_extras
class DataConfig(OpenSection):
    """The data set, and how samples reach the ranks."""

    section = "data"
    owners: ClassVar[Owners] = {
        f"data.{name}": ("data.shuffle", "full") for name in ("shuffle_block", "shuffle_window")
    }

    @property
    def is_of_texts(self) -> bool:
        """Whether samples are texts or chats of different lengths, which are read as tokens."""
        is_named = any(self.options.get(option) is not None for option in ("text", "messages"))
        is_of_documents = self.options.get("documents") is True
        return self.name in document_files().values() or is_named or is_of_documents

    @property
    def opener(self) -> str:
        """The "module:function" of an extra that opens the user's data; empty: as_source() does."""
        return ""

    name: str = Field(
        default="digits",
        description="data set: digits (embedded), mnist, fashion_mnist, kmnist, cifar10, "
        f"cifar100, {', '.join([*image_files(), 'synthetic', *token_images()])}, "
        f"{', '.join(dict.fromkeys(['text', *document_files().values()]))}; "
        f"{'scientific formats: ' if _SCIENTIFIC else ''}{', '.join(_SCIENTIFIC)}"
        f"{'; ' if _SCIENTIFIC else ''}or "
        "your own as package.module:function",
    )
    root: str | None = Field(
        default=None, description="folder that contains the data; default: the data set's own"
    )
    stage: str | None = Field(
        default=None,
        description="folder on a local disk of each node; one rank per node copies the data "
        "there and verifies the copy, and all ranks of the node read it",
    )
    val_share: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="fraction of the training set, of each class, to hold out for validation "
        "instead of using the data set's own validation set; the same samples in "
        "every run",
    )
    share: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="fraction of the training set, of each class, to train on; the rest is not "
        "used. The same samples in every run, and those of a smaller fraction among "
        "them, to draw the error over the size of the training set",
    )
    mean: list[float] = Field(
        default_factory=list,
        description="mean of each image channel, in units of pixels / 255, instead of the "
        "training set's; use the mean that model.weights was trained with: "
        "[0.485,0.456,0.406]",
    )
    std: list[float] = Field(
        default_factory=list,
        description="standard deviation of each image channel; set it together with "
        "data.mean: [0.229,0.224,0.225]",
    )
    inputs: list[str] = Field(
        default_factory=list,
        description="fields of the data to pass to your own model: [image,table]. Each is "
        "passed as the parameter of forward() with its name, otherwise all are "
        "passed as a dict; default: the required parameters of forward(), or x",
    )
    pad: dict[str, float] = Field(
        default_factory=dict,
        description="variable-length fields and their padding value: {tokens: 0}; each "
        "micro-batch is padded to its longest sample, and the field tokens_mask "
        "marks the real values (framework=torch; your own data)",
    )
    mask: dict[str, str] = Field(
        default_factory=dict, description="other names for the masks of data.pad: {tokens: mask}"
    )
    gaps: list[str] = Field(
        default_factory=list,
        description="fields whose floats may be NaN, where a value is missing: points of y without "
        "a value are in no loss and no metric, those of x get the mean of their channel "
        "(task.name=regression; arrays and files of arrays)",
    )
    shift: int | None = Field(
        default=None,
        ge=1,
        le=2**30,
        description="y is that of the sample so many steps later, or x of it if the data have no "
        "y: forecasts of a series; in each set both samples are of that set",
    )
    bucket_by: str | None = Field(
        default=None,
        description="length: group samples of similar length into the same micro-batch of a "
        "step; or the name of a field of data.pad whose lengths count; default: "
        "keep the shuffled order",
    )
    pack: int | None = Field(
        default=None,
        ge=2,
        le=2**26,
        description="length in tokens of the rows into which the sequences of the field "
        "tokens are packed; a packed row is one sample of the job "
        "(task.name=language, framework=torch; your own data)",
    )
    class_names: list[str] | None = Field(
        default=None,
        description="name of each class, in the order of the labels; default: the data set's "
        "own (recorded in config.yaml)",
    )
    sampling: Literal["global", "partition"] = Field(
        default="global",
        description="global: each rank reads its slice of every global batch; partition: the "
        "shuffled samples of each epoch are first divided among the ranks",
    )
    shuffle: Literal["full", "blocks"] = Field(
        default="full",
        description="full: shuffle all samples once per epoch; blocks: shuffle blocks of "
        "neighbouring samples, then the samples within each window of "
        "data.shuffle_window blocks, for files in which single samples are slow "
        "to read",
    )
    shuffle_block: int | None = Field(
        default=None,
        ge=1,
        le=2**40,
        description="samples per block; default: the size of a chunk or row group in the "
        "files, otherwise 256",
    )
    shuffle_window: int = Field(
        default=16,
        ge=1,
        le=2**20,
        description="number of blocks whose samples are shuffled together",
    )
    sample_weights: str | None = Field(
        default=None,
        description="draw samples with replacement, in proportion to this field of the data, "
        "such as `weight`; balanced: in inverse proportion to the frequency of "
        "their class y; default: each sample once per epoch",
    )
    resident: bool | None = Field(
        default=None,
        description="keep the training set in the device's memory; default: yes on a GPU with "
        "four times as much free memory",
    )
    ahead: int | None = Field(
        default=None,
        ge=0,
        le=1000,
        description="training steps to prefetch; default: one per reader, at least 2, or 0 if "
        "the data is in memory",
    )
    readers: int | None = Field(
        default=None,
        ge=1,
        le=1024,
        description="threads of this rank that read and decode samples; default: the rank's "
        "share of the cores, at most 8",
    )
    workers: int | None = Field(
        default=None,
        ge=0,
        le=1024,
        description="worker processes per rank and data set; default for image files with "
        "data.packed=false and for scientific file formats: 0 (threads decode); "
        "default for your own torch Dataset: num_workers of its DataLoader, "
        "otherwise 0 (the rank reads its samples between steps)",
    )
