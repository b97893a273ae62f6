"""Writes files of tokens: each portion of the documents becomes a .bin with its .idx, and a record
that says that both are complete."""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from hvdtrain.core.folder import UNFINISHED, Folder
from hvdtrain.data.tokenizer import Tokenizer
from hvdtrain.errors import UserError
from hvdtrain.extras.tokens.inputs import (
    InputDocument,
    InputFile,
    Portion,
    check_unchanged,
    documents_in,
)
from hvdtrain.extras.tokens.manifest import (
    BYTES,
    FILE,
    Manifest,
    WrittenShard,
    read_json,
    read_manifest,
    shard_of,
)
from hvdtrain.extras.tokens.megatron import SUFFIX, index_bytes

_BYTES = 256
_OF_COMMAND = re.compile(rf"tokens-\d{{5,}}(\.bin|\.json|{re.escape(SUFFIX)})")


@dataclass(frozen=True)
class TextEncoder:
    """How a text becomes tokens."""

    tokenizer: Tokenizer | None  # None: each byte is a token
    end: int | None  # the token at the end of each document
    field: str  # of JSON lines and tables

    @property
    def vocabulary(self) -> int:
        own = _BYTES if self.tokenizer is None else self.tokenizer.vocabulary
        return own if self.end is None else max(own, self.end + 1)

    @property
    def dtype(self) -> str:
        """The type of the tokens in the files; Megatron's format has no uint32."""
        return "uint16" if self.vocabulary <= 2**16 else "int32"

    def encode(self, document: InputDocument) -> np.ndarray:
        """Returns the tokens of a document. Raises UserError if the tokenizer does."""
        if self.tokenizer is None:
            tokens = np.frombuffer(document.text.encode(), np.uint8).astype(self.dtype)
        else:
            try:
                tokens = np.array(self.tokenizer.encode(document.text), self.dtype)
            except UserError as error:
                error.where = f"{error.where}, for {document.where}"
                raise
        end = np.full(int(self.end is not None and len(tokens) > 0), self.end or 0, self.dtype)
        return np.concatenate([tokens, end])


@dataclass(frozen=True)
class Output:
    """The files of one command in a folder."""

    folder: Folder
    encoder: TextEncoder
    portions: Sequence[Portion]
    settings: str  # digest of everything that decides the content of the files

    def name(self, number: int) -> str:
        return f"tokens-{number:05d}"

    def finished(self, number: int) -> WrittenShard | None:
        """Returns the record of a complete file; None if there is none."""
        path = self.folder.path / f"{self.name(number)}.json"
        found = read_json(path)
        if found is None:
            return None
        shard = shard_of(found)
        status = self.folder.status(shard.file)
        index = self.folder.status(f"{self.name(number)}{SUFFIX}")
        is_whole = status is not None and status.st_size == shard.bytes and index is not None
        return shard if is_whole else None

    def write(self, number: int, add: Callable[[int], None]) -> WrittenShard:
        """Tokenizes a portion and writes its files; they appear once they are complete. add:
        called with the tokens of each document."""
        name = self.name(number)
        lengths = array("q")
        hashed = xxhash.xxh3_128()
        portion = self.portions[number]
        with self.folder.replacing(f"{name}.bin") as file:
            for part in portion:
                for document in documents_in(part, self.encoder.field):
                    tokens = self.encoder.encode(document)
                    add(len(tokens))
                    if not len(tokens):
                        continue  # of an empty text
                    content = tokens.astype(tokens.dtype.newbyteorder("<"), copy=False).tobytes()
                    file.write(content)
                    hashed.update(content)
                    lengths.append(len(tokens))
            for file_of_part in {part.file for part in portion}:
                check_unchanged(file_of_part)
        counts = np.array(lengths, np.int64)
        self.folder.replace(f"{name}{SUFFIX}", index_bytes(self.encoder.dtype, counts))
        tokens_of_file = int(counts.sum())
        width = np.dtype(self.encoder.dtype).itemsize
        shard = WrittenShard(
            f"{name}.bin",
            tokens_of_file,
            len(counts),
            tokens_of_file * width,
            hashed.hexdigest(),
        )
        record = {"settings": self.settings, **shard._asdict()}
        self.folder.replace(f"{name}.json", json.dumps(record).encode() + b"\n")
        return shard

    def complete(self, shards: Sequence[WrittenShard]) -> Manifest:
        """Writes tokens.json, removes the records and files without tokens, and returns it. Raises
        UserError if there are no tokens."""
        if not any(shard.tokens for shard in shards):
            raise UserError(
                "the inputs have no text", "FILES of the command line", "files with documents"
            )
        tokenizer = self.encoder.tokenizer
        manifest = Manifest(
            BYTES if tokenizer is None else tokenizer.path.name,
            "" if tokenizer is None else tokenizer.digest,
            self.encoder.vocabulary,
            self.encoder.dtype,
            self.encoder.end,
            self.settings,
            tuple(shard for shard in shards if shard.tokens),
        )
        self.folder.replace(FILE, manifest.content())
        remove_rest(self.folder, manifest)
        return manifest


def settings_of(
    files: Sequence[InputFile], encoder: TextEncoder, shard_bytes: int, names: Sequence[str]
) -> str:
    """Returns a digest of the inputs and options. names: of the files, as the command has them."""
    tokenizer = encoder.tokenizer
    found = {
        "tokenizer": BYTES if tokenizer is None else tokenizer.digest,
        "end": encoder.end,
        "field": encoder.field,
        "shard_bytes": shard_bytes,
        "files": [
            [name, file.size, file.mtime_ns] for name, file in zip(names, files, strict=True)
        ],
    }
    return xxhash.xxh3_128(json.dumps(found, sort_keys=True).encode()).hexdigest()


def complete_already(folder: Folder, settings: str) -> Manifest | None:
    """Returns the manifest if an earlier command has finished. Raises UserError if it had other
    settings, or if its files have changed."""
    manifest = read_manifest(folder.path)
    if manifest is None:
        return None
    if manifest.settings != settings:
        raise other_settings(folder)
    for shard in manifest.shards:
        status = folder.status(shard.file)
        if status is None or status.st_size != shard.bytes:
            found = "is missing" if status is None else f"has {status.st_size:,} bytes"
            raise UserError(
                f"tokens.json lists {shard.file} with {shard.bytes:,} bytes, but it {found}",
                str(folder.path),
                "--force removes the files of DIR, and writes them again",
            )
    remove_rest(folder, manifest)  # the command may have been killed before it removed them
    return manifest


def remove_rest(folder: Folder, manifest: Manifest) -> None:
    """Removes what only an unfinished command needs, files without tokens, and the unfinished files
    of a command that was killed."""
    listed = {shard.file for shard in manifest.shards}
    for name in _of_command(folder):
        stem = name.rpartition(".")[0]
        if name.endswith(".json") or f"{stem}.bin" not in listed:
            folder.remove(name)
    for name in folder.names():
        if name.startswith(".tokens") and name.endswith(UNFINISHED):
            folder.remove(name)


def remove_all(folder: Folder) -> None:
    """Removes the files of an earlier command, whatever its settings."""
    for name in (*_of_command(folder), FILE):
        if folder.status(name) is not None:
            folder.remove(name)


def _of_command(folder: Folder) -> list[str]:
    return [name for name in folder.names() if _OF_COMMAND.fullmatch(name)]


def check_records(folder: Folder, settings: str) -> None:
    """Raises UserError if an unfinished command with other settings has left files."""
    for name in _of_command(folder):
        if name.endswith(".json"):
            found = read_json(folder.path / name)
            if found is not None and found.get("settings") != settings:
                raise other_settings(folder)


def other_settings(folder: Folder) -> UserError:
    return UserError(
        "the folder has files of tokens of other inputs or options",
        str(folder.path),
        "the same FILES, tokenizer, --end, --text and --shard-mb; another --to; or --force, which "
        "removes them",
    )
