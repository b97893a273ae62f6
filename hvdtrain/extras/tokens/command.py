"""hvdtrain tokenize: writes texts as files of tokens, on any number of ranks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hvdtrain.cli.options import CommandParser
from hvdtrain.comm.on_all_ranks import MEET_S, on_rank_0
from hvdtrain.config.read import expand
from hvdtrain.core.folder import Folder
from hvdtrain.data.tokenizer import Tokenizer, read_tokenizer
from hvdtrain.errors import DONE, UserError, short
from hvdtrain.extras.tokens.inputs import find_inputs, portions_of
from hvdtrain.extras.tokens.manifest import Manifest, WrittenShard, read_json
from hvdtrain.extras.tokens.shards import (
    Output,
    TextEncoder,
    check_records,
    complete_already,
    remove_all,
    settings_of,
)
from hvdtrain.training.failure import RankFailed
from hvdtrain.training.run_rank import ConnectedRank, on_connected_ranks

USAGE = """\
hvdtrain tokenize --to DIR [--tokenizer FILE] [--text FIELD] [--end TOKEN] [--shard-mb N] [--force] FILES [key=value ...]
  --to           the folder of the files of tokens and of tokens.json, for data.name=tokens data.root=DIR; all ranks must see it
  FILES          .txt and .md, a document each; .jsonl and .ndjson, a document in each line; .parquet, a document in each row; or
                 folders of them
  --tokenizer    a tokenizer.json, or the folder of a model of transformers that has one (default: each byte is a token)
  --text         the field of JSON lines, or the column of tables, with the text (default: text)
  --end          the token at the end of each document, such as <|endoftext|>; none: no token (default: eos_token of the
                 tokenizer's folder, or its only token of a usual name; of bytes token 256)
  --shard-mb     megabytes of input in each file of tokens; a document, a text file and a row group are not divided (default 256)
  --force        remove the files of tokens of other inputs from DIR first
  key=value      comm.* and guard.*
The same bytes are written on each number of ranks (mpirun -np 8 hvdtrain tokenize ...). Interrupted? The same command continues:
it keeps finished files. The files are pairs .bin and .idx, which Megatron reads too."""  # noqa: E501
_USUAL_ENDS = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "[EOS]", "<|eos|>")
_END_OF_BYTES = 256
_EVERY_S = 10.0  # between two lines of progress


class _Request(NamedTuple):
    """The options of the command line."""

    to: Path
    files: list[str]
    tokenizer: Path | None
    field: str
    end: str | None
    shard_bytes: int
    force: bool
    overrides: list[str]


def tokenize(arguments: Sequence[str]) -> int:
    """Runs `tokenize` on this rank; returns the exit code. Raises UserError only for a mistake in
    the command line."""
    if not arguments or {"-h", "--help"} & set(arguments):
        print(USAGE)
        return DONE
    request = _read(arguments)
    try:
        return on_connected_ranks(
            lambda rank: _tokenize(rank, request),
            None,
            ["batch.per_rank=1", *request.overrides],
            what="tokenization",
        )
    except RankFailed as failed:
        return failed.code


def _read(arguments: Sequence[str]) -> _Request:
    parser = CommandParser("tokenize", USAGE.partition("\n")[0])
    for name in ("--to", "--tokenizer", "--end"):
        parser.add_argument(name)
    parser.add_argument("--text", default="text")
    parser.add_argument("--shard-mb", default="256")
    parser.add_argument("--force", action="store_true")
    parsed, words = parser.parse_known_args(list(arguments))
    if unknown := [word for word in words if word.startswith("-")]:
        parser.error(f"unknown argument '{short(unknown[0])}': one of {', '.join(parser.names())}")
    overrides = [word for word in words if word.startswith(("comm.", "guard.")) and "=" in word]
    files = [word for word in words if word not in overrides]
    if parsed.to is None:
        parser.error("--to DIR is missing: the folder of the files of tokens")
    if not files:
        parser.error("FILES are missing: texts, JSON lines or Parquet files, or folders of them")
    shard_mb = _number(parsed.shard_mb)
    if not 1e-3 <= shard_mb <= 2**20:
        parser.error(f"--shard-mb {short(parsed.shard_mb)} is not a number from 0.001 to 1048576")
    return _Request(
        to=expand(parsed.to, "--to"),
        files=files,
        tokenizer=None if parsed.tokenizer is None else expand(parsed.tokenizer, "--tokenizer"),
        field=parsed.text,
        end=parsed.end,
        shard_bytes=round(shard_mb * 10**6),
        force=parsed.force,
        overrides=overrides,
    )


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0


def _tokenize(rank: ConnectedRank, request: _Request) -> int:
    communicator = rank.communicator
    rank.heartbeat.beat("reading the inputs", 0, 0)
    encoder = _encoder(request)
    files = find_inputs(request.files)
    settings = settings_of(files, encoder, request.shard_bytes, [file.name for file in files])
    _check_same(rank, settings)
    manifest = on_rank_0(communicator, lambda: _prepare(request, settings))
    if manifest is None:
        portions = portions_of(files, request.shard_bytes, request.field)
        with Folder.open(request.to) as folder:
            manifest = _write(rank, Output(folder, encoder, portions, settings))
        words = "wrote"
    else:
        words = "nothing to do: complete since an earlier command,"
    if communicator.rank == 0:
        tokens = sum(shard.tokens for shard in manifest.shards)
        documents = sum(shard.documents for shard in manifest.shards)
        print(
            f"{words} {tokens:,} tokens of {documents:,} documents, files of tokens: "
            f"{len(manifest.shards):,} in {request.to}\n"
            f"vocabulary {manifest.vocabulary:,} ({manifest.tokenizer}), {manifest.dtype}; train "
            f"with data.name=tokens data.root={request.to} task.name=language"
        )
    return DONE


def _check_same(rank: ConnectedRank, settings: str) -> None:
    """Raises UserError if this rank sees other inputs than rank 0."""
    first = rank.communicator.broadcast_object(settings)
    if first != settings:
        raise UserError(
            f"rank {rank.communicator.rank} sees other inputs or another tokenizer than rank 0: "
            "their sizes, times or tokens differ",
            "FILES",
            "a file system that all hosts share",
        )


def _prepare(request: _Request, settings: str) -> Manifest | None:
    """Creates the folder. Returns the manifest if an earlier command has done the work."""
    try:
        with Folder.make(request.to) as folder:
            if request.force:
                remove_all(folder)
            check_records(folder, settings)
            return complete_already(folder, settings)
    except OSError as error:
        raise UserError(
            f"the folder cannot be used: {error.strerror or error}",
            str(request.to),
            "--to DIR, a folder that you may write to",
        ) from None


def _write(rank: ConnectedRank, output: Output) -> Manifest:
    """Writes this rank's share of the files, then tokens.json on rank 0."""
    communicator = rank.communicator
    progress = _Counts(rank, len(output.portions))
    shards: dict[int, WrittenShard] = {}
    for number in range(communicator.rank, len(output.portions), communicator.size):
        shards[number] = output.finished(number) or _written(output, number, progress)
        progress.files += 1
    progress.wait_for_all()
    every = communicator.allgather_object([[n, *shard] for n, shard in shards.items()])
    merged = {n: WrittenShard(*fields) for of_rank in every for n, *fields in of_rank}
    return on_rank_0(
        communicator, lambda: output.complete([merged[n] for n in range(len(output.portions))])
    )


def _written(output: Output, number: int, progress: _Counts) -> WrittenShard:
    try:
        return output.write(number, progress.add)
    except OSError as error:
        raise UserError(
            f"file {number} of tokens cannot be written: {error.strerror or error}",
            str(output.folder.path),
            "free space there, or repair what is named; the same command continues",
        ) from error


class _Counts:
    """What all ranks have done. They meet every few seconds, so that a rank that waits for the
    others does not count as stalled."""

    def __init__(self, rank: ConnectedRank, of_files: int) -> None:
        self._rank = rank
        self._of_files = of_files
        self._began_s = time.monotonic()
        self._met_s = self._began_s
        self._shown_s = self._began_s
        self.files = 0
        self._tokens = 0

    def add(self, tokens: int) -> None:
        """Counts the tokens of a document."""
        self._tokens += tokens
        self._rank.heartbeat.go_on()
        if time.monotonic() - self._met_s >= MEET_S:
            self._meet(works_on=True)

    def wait_for_all(self) -> None:
        """Returns once all ranks are here."""
        while self._meet(works_on=False):
            self._rank.heartbeat.go_on()

    def _meet(self, works_on: bool) -> bool:
        """Adds the counts of all ranks up, and prints them. Returns whether a rank still works."""
        own = np.array([works_on, self.files, self._tokens], np.int64)
        working, files, tokens = self._rank.communicator.allreduce(own, "tokenize").tolist()
        self._met_s = time.monotonic()
        is_due = self._met_s - self._shown_s >= _EVERY_S
        if working and is_due and self._rank.communicator.rank == 0:
            self._shown_s = self._met_s
            rate = tokens / (self._met_s - self._began_s)
            print(
                f"{files:,} of {self._of_files:,} files, {tokens:,} tokens, {rate:,.0f} tokens/s",
                flush=True,
            )
        return bool(working)


def _encoder(request: _Request) -> TextEncoder:
    """Returns how texts become tokens. Raises UserError if the tokenizer is damaged, or if the
    token at the end is unknown."""
    notes: list[str] = []
    path = request.tokenizer
    tokenizer = None if path is None else read_tokenizer(path, notes)
    if tokenizer is None:
        if request.end not in (None, "none"):
            raise UserError(
                f"--end {short(str(request.end))} needs a tokenizer: without one, tokens are bytes",
                "command line of tokenize",
                f"--tokenizer FILE; or leave --end out: token {_END_OF_BYTES}",
            )
        end = None if request.end == "none" else _END_OF_BYTES
        return TextEncoder(None, end, request.field)
    return TextEncoder(tokenizer, _end_of(tokenizer, request), request.field)


def _end_of(tokenizer: Tokenizer, request: _Request) -> int | None:
    if request.end == "none":
        return None
    if request.end is not None:
        number = tokenizer.number(request.end)
        if number is None:
            raise UserError(
                f"the tokenizer has no token {short(request.end)}",
                str(tokenizer.path),
                "--end with one of its tokens, or --end none",
            )
        return number
    named = _eos_of_folder(tokenizer.path.parent) if _is_folder(request) else None
    found = [token for token in (named, *_USUAL_ENDS) if token is not None]
    known = [token for token in found if tokenizer.number(token) is not None]
    if not known or (named is None and len(known) > 1):
        what = f"has the tokens {' and '.join(known)}" if known else "has no token of a usual name"
        raise UserError(
            f"which token ends a document is unknown: the tokenizer {what}",
            str(tokenizer.path),
            "--end TOKEN, or --end none",
        )
    return tokenizer.number(known[0])


def _is_folder(request: _Request) -> bool:
    return request.tokenizer is not None and request.tokenizer.is_dir()


def _eos_of_folder(folder: Path) -> str | None:
    """Returns the eos_token of tokenizer_config.json, a string or an object with `content`."""
    config = read_json(folder / "tokenizer_config.json") or {}
    found = config.get("eos_token")
    content = found.get("content") if isinstance(found, dict) else found
    return content if isinstance(content, str) else None
