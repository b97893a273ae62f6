"""tokens.json: what `hvdtrain tokenize` records beside its files of tokens."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from hvdtrain.core.folder import check_regular
from hvdtrain.errors import UserError, first_line

FILE = "tokens.json"
FORMAT = "hvdtrain tokens 1"
BYTES = "bytes"  # the name of the tokenizer whose tokens are bytes
_MOST_BYTES = 2**28
_FIX = "run `hvdtrain tokenize` again with the same arguments: finished files are kept"


class WrittenShard(NamedTuple):
    """One finished file of tokens, with an index beside it."""

    file: str
    tokens: int
    documents: int
    bytes: int
    digest: str  # xxh3_128 of the file's content


@dataclass(frozen=True)
class Manifest:
    """The content of tokens.json."""

    tokenizer: str  # the name of its file, or BYTES
    tokenizer_digest: str  # empty for BYTES
    vocabulary: int
    dtype: str
    end: int | None  # the token at the end of each document
    settings: str  # digest of the inputs and options that the files were made from
    shards: tuple[WrittenShard, ...]

    def content(self) -> bytes:
        found = {
            "format": FORMAT,
            "tokenizer": self.tokenizer,
            "tokenizer_digest": self.tokenizer_digest,
            "vocabulary": self.vocabulary,
            "dtype": self.dtype,
            "end": self.end,
            "documents": sum(shard.documents for shard in self.shards),
            "tokens": sum(shard.tokens for shard in self.shards),
            "settings": self.settings,
            "shards": [shard._asdict() for shard in self.shards],
        }
        return (json.dumps(found, indent=1) + "\n").encode()


def read_json(path: Path) -> dict[str, Any] | None:
    """Returns the object in a file; None if there is no such file. Raises UserError if it is
    damaged."""
    try:
        if check_regular(path).st_size > _MOST_BYTES:
            raise UserError(f"more than {_MOST_BYTES} bytes", str(path), _FIX)
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(
            f"the file cannot be read as JSON: {first_line(error)}", str(path), _FIX
        ) from None
    if not isinstance(found, dict):
        raise UserError("the file is not a JSON object", str(path), _FIX)
    return found


def read_manifest(folder: Path) -> Manifest | None:
    """Returns the manifest of a folder; None if it has none. Raises UserError if it is damaged or
    of another version."""
    path = folder / FILE
    found = read_json(path)
    if found is None:
        return None
    if found.get("format") != FORMAT:
        raise UserError(
            f"the file has format {found.get('format')!r}, expected {FORMAT!r}",
            str(path),
            "the version of hvdtrain that wrote it, or tokenize the texts again",
        )
    try:
        shards = tuple(shard_of(one) for one in found["shards"])
        end = found["end"]
        return Manifest(
            str(found["tokenizer"]),
            str(found["tokenizer_digest"]),
            _whole(found["vocabulary"]),
            str(found["dtype"]),
            None if end is None else _whole(end),
            str(found["settings"]),
            shards,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"the file is damaged: {type(error).__name__} {first_line(error)}", str(path), _FIX
        ) from None


def shard_of(found: Any) -> WrittenShard:
    """Returns the shard of a JSON object. Raises KeyError, TypeError or ValueError."""
    file = str(found["file"])
    if Path(file).name != file:
        raise ValueError(f"{file} is outside of the folder")
    counts = [_whole(found[name]) for name in ("tokens", "documents", "bytes")]
    return WrittenShard(file, counts[0], counts[1], counts[2], str(found["digest"]))


def _whole(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not a count")
    return value
