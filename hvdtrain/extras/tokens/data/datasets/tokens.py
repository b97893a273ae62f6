"""Files of token ids, memory-mapped: windows of one stream, or documents; several sets mixed by
weight."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hvdtrain.data.declared import bounded_alike
from hvdtrain.data.files.selection import Staging
from hvdtrain.data.option_error import NoValidationSet, OptionError, expanded
from hvdtrain.data.source import Source, Split
from hvdtrain.errors import UserError
from hvdtrain.extras.split_files.files import files_of_split
from hvdtrain.extras.tokens.manifest import Manifest, read_json, read_manifest
from hvdtrain.extras.tokens.mixture import Mixture, parts_of_period
from hvdtrain.extras.tokens.token_files import SUFFIXES, TokenSet, open_file
from hvdtrain.extras.tokens.windows import TokenDocuments, TokenWindows, documents_of

STAGING = Staging(is_of_user=True, may_be_a_file=True)
_CONTEXT = 256
_MOST_VOCABULARY = 2**24  # tokens; a model has a row for each


def build(
    name: str,
    root: Path | None,
    split: Split,
    *,
    context: int | None = None,
    vocabulary: int | None = None,
    dtype: Literal["uint8", "uint16", "uint32", "int32", "int64"] | None = None,
    documents: bool = False,
    end: int | None = None,
    mixture: dict[str, float] | None = None,
) -> Source:
    """Files of token ids for task.name=language: FILE.bin, with Megatron's FILE.idx or without,
    FILE.npy, or a folder that `hvdtrain tokenize` wrote. A folder may have train and val folders,
    or files train*.bin and val*.bin.

    The files of a set are one stream, which is cut into windows of context + 1 tokens. A window
    begins with the last token of the previous one, so that each token except the first is predicted
    once.

    context: number of tokens from which the next one is predicted; the most of a sample with
        data.documents (default: 256, with data.documents no limit)
    vocabulary: the tokens are below it (default: that of tokens.json, which may be increased to pad
        the model's table)
    dtype: of the tokens of a .bin file without an index (default: uint16)
    documents: each document is a sample, for data.pack or padded to the longest of a micro-batch
        (true or false)
    end: token that ends a document, for files without an index
    mixture: data sets in data.root, a file or a folder each, with their weights: {wiki: 0.7, code:
        0.3}. They are mixed in these proportions, and a set that runs out begins again in a new
        order

    Raises UserError without a root, for damaged files, and if the vocabulary is unknown.
    """
    if root is None:
        raise OptionError(
            "data.name=tokens needs data.root",
            "root",
            "data.root=FILE.bin, or a folder with train.bin and val.bin; `hvdtrain tokenize --to "
            "DIR FILES` writes one",
        )
    if context is not None and not 1 <= context <= 2**20:
        raise OptionError(f"a context of {context} tokens is impossible", "context", "1 to 1048576")
    if vocabulary is not None and not 1 <= vocabulary <= _MOST_VOCABULARY:
        raise OptionError(
            f"a vocabulary of {vocabulary} tokens is impossible", "vocabulary", "1 to 16777216"
        )
    if end is not None and not documents:
        raise OptionError(
            "data.end has no effect without data.documents=true",
            "end",
            "data.documents=true, or leave data.end out",
        )
    reader = _Reader(split, context, vocabulary, dtype, documents, end)
    folder = expanded(root, "root")
    if mixture is None:
        return reader.source(folder, "")
    _check_weights(mixture)
    names = tuple(sorted(mixture))
    sets = [reader.source(folder / one, one) for one in names]
    _check_alike(sets, names)
    parts = parts_of_period([mixture[one] for one in names])
    return Mixture(tuple(bounded_alike(*sets)), names, parts)


@dataclass(frozen=True)
class _Reader:
    """The options of one set."""

    split: Split
    context: int | None
    vocabulary: int | None
    dtype: str | None
    documents: bool
    end: int | None

    def source(self, root: Path, name: str) -> TokenWindows | TokenDocuments:
        """Opens a set. name: in a mixture."""
        root = _with_suffix(root)
        paths, is_split = files_of_split(root, self.split, SUFFIXES, "tokens")
        if self.split == "val" and not is_split:
            raise NoValidationSet(
                f"{root.name} contains all tokens, without a validation set",
                str(root),
                "data.val_share=0.01; or a folder with train and val",
            )
        folder = paths[0].parent
        manifest = read_manifest(folder)
        _check_finished(folder, manifest)
        _check_complete(folder, manifest, paths)
        written = {} if manifest is None else {shard.file: shard for shard in manifest.shards}
        files = tuple(open_file(path, self.dtype, written.get(path.name)) for path in paths)
        tokens = TokenSet(files, self._vocabulary(manifest, paths[0]), manifest)
        if not self.documents:
            return TokenWindows(tokens, self.context or _CONTEXT, name)
        end = self.end if manifest is None else manifest.end
        most = None if self.context is None else self.context + 1
        return documents_of(tokens, name, most, end, padding=end or 0)

    def _vocabulary(self, manifest: Manifest | None, path: Path) -> int:
        if manifest is None:
            if self.vocabulary is None:
                raise OptionError(
                    f"the vocabulary of {path.name} is unknown, because there is no tokens.json "
                    "beside it",
                    "vocabulary",
                    "data.vocabulary=N, the number of tokens of its tokenizer: 50257 for GPT-2",
                )
            return self.vocabulary
        if self.vocabulary is not None and self.vocabulary < manifest.vocabulary:
            raise OptionError(
                f"data.vocabulary={self.vocabulary}, but {path.parent.name} was written with "
                f"{manifest.tokenizer}, which has {manifest.vocabulary:,} tokens",
                "vocabulary",
                f"{manifest.vocabulary} or more, or leave it out",
            )
        return self.vocabulary or manifest.vocabulary


def _with_suffix(root: Path) -> Path:
    """Returns the file of a path without a suffix, as Megatron's commands name it."""
    files = [root.parent / f"{root.name}{suffix}" for suffix in SUFFIXES]
    return next((file for file in files if file.is_file() and not root.exists()), root)


def _check_finished(folder: Path, manifest: Manifest | None) -> None:
    """Raises UserError if `hvdtrain tokenize` was interrupted in this folder."""
    if manifest is None and any(read_json(path) for path in folder.glob("tokens-*.json")):
        raise UserError(
            "the folder is not complete: `hvdtrain tokenize` was interrupted",
            str(folder),
            "run it again with the same arguments: finished files are kept",
        )


def _check_complete(folder: Path, manifest: Manifest | None, paths: list[Path]) -> None:
    """Raises UserError if the files are not those that tokens.json lists."""
    if manifest is None:
        return
    found = {path.name for path in paths}
    listed = {shard.file for shard in manifest.shards}
    if missing := sorted(listed - found):
        raise UserError(
            f"{len(missing)} of {len(listed)} files are missing: {missing[0]}",
            str(folder),
            "restore them; or remove tokens.json, and run `hvdtrain tokenize` again with the same "
            "arguments",
        )
    if others := sorted(found - listed):
        raise UserError(
            f"tokens.json does not list the file {others[0]}",
            str(folder / others[0]),
            "move it to a folder of its own",
        )


def _check_weights(mixture: Mapping[str, float]) -> None:
    if not mixture:
        raise OptionError("data.mixture has no sets", "mixture", "{wiki: 0.7, code: 0.3}")
    for name, weight in mixture.items():
        if not (math.isfinite(weight) and weight > 0):
            raise OptionError(
                f"the weight of {name} is {weight:g}, expected a number above 0",
                "mixture",
                "a positive weight, or leave the set out",
            )


def _check_alike(sets: Sequence[TokenWindows | TokenDocuments], names: Sequence[str]) -> None:
    """Raises UserError if the tokens of two sets mean different texts."""
    first = sets[0].tokens
    for source, name in zip(sets, names, strict=True):
        tokens = source.tokens
        if tokens.vocabulary != first.vocabulary:
            raise OptionError(
                f"{names[0]} has a vocabulary of {first.vocabulary:,} tokens, and {name} one of "
                f"{tokens.vocabulary:,}",
                "mixture",
                "sets of one tokenizer; or data.vocabulary=N for all, if only the size differs",
            )
        manifests = (first.manifest, tokens.manifest)
        digests = {one.tokenizer_digest for one in manifests if one is not None}
        if len(digests) > 1:
            raise OptionError(
                f"{names[0]} and {name} were written with different tokenizers",
                "mixture",
                "tokenize both with the same one",
            )
