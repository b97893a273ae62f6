"""data.name=tokens: windows and documents of each kind of file beside numpy, mixtures by weight,
and what is refused."""

from __future__ import annotations

import dataclasses
import json
import os
import struct
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ranks import needs_extra

from hvdtrain.config.read import configure
from hvdtrain.data.sampler import parts_of_rank
from hvdtrain.data.source import Source
from hvdtrain.data.subset import subset
from hvdtrain.errors import UserError
from hvdtrain.extras.tokens.megatron import index_bytes, read_index
from hvdtrain.extras.tokens.mixture import (
    MOST_PERIOD,
    MixtureOrder,
    parts_of_period,
    pattern_of,
)
from hvdtrain.training.conflicts import refuse_conflicts
from hvdtrain.training.data_facts import identity
from hvdtrain.training.datasets import Datasets, build_source, open_datasets

V = 50
DOCUMENTS = [[3, 4, 5, 9], [9], [7, 1, 2, 6, 8, 9], [5, 9]]  # 9 ends each
STREAM = [token for document in DOCUMENTS for token in document]


def index_of(lengths: list[int], documents: list[int], code: int, width: int) -> bytes:
    """An index as Megatron describes it, by struct alone."""
    content = b"MMIDIDX\x00\x00" + struct.pack("<Q", 1) + struct.pack("<B", code)
    content += struct.pack("<QQ", len(lengths), len(documents))
    content += struct.pack(f"<{len(lengths)}i", *lengths)
    places = [width * sum(lengths[:number]) for number in range(len(lengths))]
    content += struct.pack(f"<{len(lengths)}q", *places)
    return content + struct.pack(f"<{len(documents)}q", *documents)


def pair(folder: Path, name: str = "a", code: int = 8, kind: str = "H") -> Path:
    """STREAM as a pair of Megatron, by struct alone."""
    folder.mkdir(exist_ok=True, parents=True)
    path = folder / f"{name}.bin"
    path.write_bytes(struct.pack(f"<{len(STREAM)}{kind}", *STREAM))
    lengths = [len(document) for document in DOCUMENTS]
    content = index_of(lengths, [0, 1, 2, 3, 4], code, struct.calcsize(f"<{kind}"))
    path.with_suffix(".idx").write_bytes(content)
    return path


def raw(path: Path, tokens: Any, dtype: str = "uint16") -> Path:
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_bytes(np.asarray(tokens, dtype).tobytes())
    return path


def opened(root: Path, *words: str, split: Any = "train") -> Source:
    job = ["data.name=tokens", f"data.root={root}", f"data.vocabulary={V}"]
    return build_source(configure(None, [*job, "task.name=language", *words]), split)


def read(source: Source, *indices: int) -> list[list[int]]:
    rows: list[list[int]] = source.read(np.array(indices, np.int64))["tokens"].tolist()
    return rows


@pytest.mark.parametrize(("code", "kind"), [(1, "B"), (8, "H"), (4, "i"), (5, "q")])
def test_the_index_of_megatron(tmp_path: Path, code: int, kind: str) -> None:
    path = pair(tmp_path, code=code, kind=kind)
    index = read_index(path.with_suffix(".idx"), path.stat().st_size)
    assert index.document_edges.tolist() == [0, 4, 5, 11, 13] and index.tokens == 13
    lengths = np.array([len(document) for document in DOCUMENTS])
    assert index_bytes(index.dtype, lengths) == path.with_suffix(".idx").read_bytes()
    assert read(opened(tmp_path / "a", "data.context=4"), 2, 0) == [STREAM[8:13], STREAM[:5]]
    documents = opened(path, "data.documents=true", "data.end=9")
    assert [
        row[:length] for row, length in zip(read(documents, 0, 1, 2), (4, 6, 2), strict=True)
    ] == [
        DOCUMENTS[0],
        DOCUMENTS[2],
        DOCUMENTS[3],
    ]
    # sentences as sequences: documents of several
    sentences = index_of([2, 2, 1, 3, 3, 2], [0, 2, 3, 5, 6], code, struct.calcsize(f"<{kind}"))
    path.with_suffix(".idx").write_bytes(sentences)
    assert read(opened(path, "data.documents=true"), 1)[0] == DOCUMENTS[2]


def test_windows_of_files_are_those_of_one_stream(tmp_path: Path) -> None:
    tokens = np.random.default_rng(1).integers(0, V, 103)
    raw(tmp_path / "one" / "train.bin", tokens)
    raw(tmp_path / "one" / "val.bin", tokens[:20])
    for name, part in (("0", tokens[:40]), ("1", tokens[40:43]), ("2", tokens[43:])):
        raw(tmp_path / "many" / f"{name}.bin", part)
    np.save(tmp_path / "array.npy", tokens.astype("int64"))
    raw(tmp_path / "wide.bin", tokens, "uint32")
    expected = np.lib.stride_tricks.sliding_window_view(tokens, 9)[::8]
    for root, words in (
        ("one", []),
        ("many", []),
        ("array.npy", []),
        ("wide.bin", ["data.dtype=uint32"]),
    ):
        source = opened(tmp_path / root, "data.context=8", *words)
        found = source.read(np.array([11, 0, 4, 5, 11]))["tokens"]
        assert found.dtype == np.int64 and len(source) == len(expected) == 12
        assert found.tolist() == expected[[11, 0, 4, 5, 11]].tolist()
        assert source.read(np.array([], np.int64))["tokens"].shape == (0, 9)
        assert source.fields["tokens"].values == V
    assert source.notes == (
        "wide.bin, 103 tokens of uint32, 12 windows; the last 6 are shorter than a window and not "
        "read",
    )
    assert len(opened(tmp_path / "one", "data.context=8", split="val")) == 2
    assert opened(tmp_path / "one").fields["tokens"].shape == (257,) if len(tokens) > 256 else True


@needs_extra("packing")
def test_documents_are_padded_packed_and_divided(tmp_path: Path) -> None:
    raw(tmp_path / "a.bin", STREAM)
    source = opened(tmp_path / "a.bin", "data.documents=true", "data.end=9")
    batch = source.read(np.array([2, 0]))
    assert batch["tokens"].tolist() == [[5, 9, 9, 9], DOCUMENTS[0]]
    assert batch["tokens_mask"].tolist() == [[True, True, False, False], [True] * 4]
    assert source.notes[0].endswith(
        "3 documents; left out, as nothing is predicted in one token: 1"
    )
    rows = opened(tmp_path / "a.bin", "data.documents=true", "data.end=9", "data.pack=6")
    packed = rows.read(np.array([0, 1]))
    assert packed["tokens"].tolist() == [[*DOCUMENTS[0], *DOCUMENTS[3]], DOCUMENTS[2]]
    assert packed["segments"].tolist() == [[1, 1, 1, 1, 2, 2], [1] * 6]
    pieces = opened(tmp_path / "a.bin", "data.documents=true", "data.end=9", "data.context=2")
    lengths = pieces.known_lengths("tokens")
    assert lengths is not None and lengths.tolist() == [3, 2, 3, 3, 2, 2]
    assert read(pieces, 0, 2, 3) == [[3, 4, 5], [7, 1, 2], [2, 6, 8]]
    assert read(pieces, 1, 4, 5) == [[5, 9], [8, 9], [5, 9]]
    assert "3 documents in 6 samples of at most 3 tokens" in pieces.notes[0]


# --- mixtures ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("weights", "parts"),
    [
        ([0.7, 0.3], (7, 3)),
        ([1, 2], (1, 2)),
        ([0.25, 0.25, 0.5], (1, 1, 2)),
        ([1e-9, 1.0], (1, MOST_PERIOD - 1)),
        ([5.0], (1,)),
    ],
)
def test_a_period_has_the_proportions_of_the_weights(
    weights: list[float], parts: tuple[int, ...]
) -> None:
    assert parts_of_period(weights) == parts


def test_the_share_of_a_set_is_exact_to_less_than_one_sample_after_any_number() -> None:
    random = np.random.default_rng(7)
    for sets in (1, 2, 3, 5, 9):
        parts = random.integers(1, 30, sets).tolist()
        pattern = pattern_of(parts)
        counts = np.cumsum(pattern.sets[:, None] == np.arange(sets), 0)
        expected = np.outer(np.arange(1, sum(parts) + 1), parts) / sum(parts)
        assert np.abs(counts - expected).max() < 1
        assert counts[-1].tolist() == parts
        before = counts[np.arange(sum(parts)), pattern.sets] - 1
        assert pattern.ordinals.tolist() == before.tolist()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_an_order_depends_on_seed_and_position_only(size: int) -> None:
    order = MixtureOrder(("code", "wiki"), (5, 40), (3, 7))
    whole = order.positions(0, 200, 45, 3)
    of_code = whole.samples[whole.samples < 5]
    assert len(of_code) == 60 and len(whole.samples) == 200  # 0.3 of them
    epochs = of_code.reshape(12, 5)  # a set that runs out begins again, in another order
    assert (np.sort(epochs) == np.arange(5)).all() and len({tuple(one) for one in epochs}) > 6
    of_wiki = whole.samples[whole.samples >= 5]
    assert sorted(of_wiki[:40]) == sorted(of_wiki[40:80]) == list(range(5, 45))
    assert of_wiki[:40].tolist() != of_wiki[40:80].tolist()
    assert order.positions(0, 200, 45, 4).samples.tolist() != whole.samples.tolist()
    for start, count, parts in ((0, 13, 1), (55, 20, 3), (131, 1, 2)):
        shares = [
            parts_of_rank(start, count, parts, rank, size, 45, 3, shuffle=order)
            for rank in range(size)
        ]
        found = [
            sample
            for part in range(parts)
            for share in shares
            for sample in share[part].samples.tolist()
        ]
        assert sorted(found) == sorted(whole.samples[start : start + count].tolist())
    far = order.positions(10**12, 10, 45, 3).samples
    assert np.count_nonzero(far < 5) == 3
    assert order.words(100) == (
        "mixed by data.mixture: the job reads epochs of each set, 6.00 of code, 1.75 of wiki"
    )


def mixed(tmp_path: Path) -> Path:
    for name, low, count in (("wiki", 0, 400), ("code", 25, 100)):
        tokens = low + np.arange(count) % 20
        raw(tmp_path / name / "train.bin", tokens)
        raw(tmp_path / name / "val.bin", tokens[:41])
    return tmp_path


MIXTURE = "data.mixture={wiki: 0.7, code: 0.3}"


def datasets(*words: str) -> tuple[Any, Datasets]:
    config = configure(None, ["data.name=tokens", "task.name=language", "model.name=gpt", *words])
    return config, open_datasets(config)


@needs_extra("packing")
def test_a_mixture_is_read_in_these_shares(tmp_path: Path) -> None:
    root = [f"data.root={mixed(tmp_path)}", "data.vocabulary=50", "data.context=8", "batch.size=10"]
    config, found = datasets(*root, MIXTURE)
    assert len(found.train) == 12 + 49 and len(found.val) == 10
    assert found.draws is not None
    for start in range(0, 300, 10):
        samples = found.draws.positions(start, 10, 61, config.seed).samples
        tokens = found.train.read(samples)["tokens"]
        assert np.count_nonzero(tokens.min(1) >= 25) == 3  # in each batch
    recorded = identity(config, found)["data"]
    assert recorded["shuffle"] == "data.mixture code 3, wiki 7 (feistel-1)"
    assert {"code: file train.bin", "wiki: file train.bin"} <= recorded.keys()
    empty = dataclasses.replace(found.train, sets=(subset(found.train.sets[0], samples[:0]),))
    with pytest.raises(UserError, match="no sample of code is left to train on"):
        empty.order  # noqa: B018
    with pytest.raises(UserError, match="wiki contains all tokens, without a validation set"):
        (tmp_path / "wiki" / "train.bin").rename(tmp_path / "wiki" / "all.bin")
        (tmp_path / "wiki" / "val.bin").unlink()
        datasets(*root, MIXTURE)
    mixed(tmp_path)
    # a part of each set, and rows of each
    more = ["data.documents=true", "data.end=39", "data.context=25", "data.pack=50"]
    rest = ["data.val_share=0.3", "batch.size=4", "data.mixture={wiki: 1, code: 1}"]
    config, found = datasets(*root, *more, *rest)
    assert found.draws is not None
    rows = found.train.read(found.draws.positions(0, 6, len(found.train), 1).samples)["tokens"]
    assert (rows.max(1) >= 25).tolist() in ([True, False] * 3, [False, True] * 3)
    notes = [note for note in found.train.notes if "sequences in" in note]
    assert [note.partition(":")[0] for note in notes] == ["training, code", "training, wiki"]


# --- what is refused --------------------------------------------------------------------------


def _written(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], list[str]]:
    """Changes a file of a pair."""

    def write(folder: Path) -> list[str]:
        path = pair(folder).with_name(name)
        path.write_bytes(change(path.read_bytes()))
        return [f"data.root={folder}/a.bin", "data.vocabulary=50"]

    return write


def _raw(*words: str, dtype: str = "uint16", odd: bool = False) -> Callable[[Path], list[str]]:
    def write(folder: Path) -> list[str]:
        path = raw(folder / "a.bin", STREAM, dtype)
        path.write_bytes(path.read_bytes() + b"\1" * odd)
        return [f"data.root={path}", *words]

    return write


def _pair(folder: Path) -> list[str]:
    return [f"data.root={pair(folder)}", "data.vocabulary=50"]


def _npy(array: np.ndarray, cut: int = 0, dtype: str = "") -> Callable[[Path], list[str]]:
    def write(folder: Path) -> list[str]:
        np.save(folder / "a.npy", array)
        content = (folder / "a.npy").read_bytes()
        (folder / "a.npy").write_bytes(content[: len(content) - cut])
        return [f"data.root={folder}/a.npy", "data.vocabulary=50", *dtype.split()]

    return write


def _mixed(*words: str) -> Callable[[Path], list[str]]:
    return lambda folder: [f"data.root={mixed(folder)}", "data.vocabulary=50", *words]


def _empty(folder: Path) -> list[str]:
    return [f"data.root={folder}", "data.vocabulary=50"]


def _manifest(folder: Path) -> list[str]:
    raw(folder / "tokens-00000.bin", STREAM)
    (folder / "tokens-00000.json").write_text(json.dumps({"settings": "x"}))
    return [f"data.root={folder}"]


SMALL = "data.context=2"
MISTAKES: list[tuple[Callable[[Path], list[str]], str]] = [
    (_written("a.bin", lambda old: old[:-4]), "truncated: it has 22 bytes, but a.idx describes 13"),
    (_written("a.bin", lambda old: old + b"\0\0"), "does not belong to its index: it has 28 bytes"),
    (_written("a.idx", lambda old: old[:-3]), "the index has 119 bytes, but 4 sequences and 5 ent"),
    (_written("a.idx", lambda old: old[:20]), "the index is truncated: 20 bytes"),
    (_written("a.idx", lambda old: b"x" + old[1:]), "not an index of Megatron: it begins with b'x"),
    (_written("a.idx", lambda old: old[:9] + b"\2" + old[10:]), "the index has version 2"),
    (
        _written("a.idx", lambda old: old[:17] + b"\6" + old[18:]),
        "tokens of type float64, expected",
    ),
    (
        _written("a.idx", lambda old: old[:34] + b"\5" + old[35:]),
        "sequence 1 begins at byte 8 with",
    ),
    (_written("a.idx", lambda old: old[:-8] + b"\3" + old[-7:]), "do not divide the 4 sequences"),
    (_written("a.bin", lambda old: b""), "the file is empty"),
    (_written("a.idx", lambda old: old[:26] + bytes(8) + old[34:]), "the index has no documents"),
    (lambda folder: [*_pair(folder), "data.dtype=int32"], "a.idx says that the tokens are uint16"),
    (lambda folder: [*_pair(folder), "data.context=0"], "a context of 0 tokens is impossible"),
    (_raw(SMALL), "the vocabulary of a.bin is unknown"),
    (_raw("data.vocabulary=50", odd=True), "27 bytes are not a whole number of uint16 tokens"),
    (_raw("data.vocabulary=9", SMALL), "token 3 of the file is 9, but the vocabulary has tokens 0"),
    (_raw("data.vocabulary=50", SMALL, dtype="float32"), "token 1 of the file is 16448"),
    (_raw("data.vocabulary=50"), "13 tokens are too few: data.context=256"),
    (_raw("data.vocabulary=50", SMALL, "data.end=9"), "data.end has no effect without data.docu"),
    (_raw("data.vocabulary=50", "data.documents=true"), "needs to know where the documents of a"),
    (_raw("data.vocabulary=50", "data.pack=8"), "data.pack needs your own data with variable-len"),
    (_raw("data.vocabulary=0"), "a vocabulary of 0 tokens is impossible"),
    (_raw("data.vocabulary=9", "data.dtype=float"), "wrong value for data.dtype"),
    (_npy(np.zeros((3, 4), np.int64)), r"the array is int64 \(3, 4\), expected integers"),
    (_npy(np.zeros(9)), "the array is float64"),
    (_npy(np.zeros(0, np.int64)), "the file has no tokens"),
    (_npy(np.zeros(9, "int8"), dtype="data.dtype=uint16"), "a.npy has tokens of int8"),
    (_npy(np.zeros(9, "int8"), dtype="data.documents=true data.end=0"), "no document has two"),
    (_npy(np.full(300, -1, "int8")), "token 0 of the file is -1, but the vocabulary has tokens 0"),
    (_npy(np.zeros(9, np.int64), cut=8), "truncated or not a .npy file"),
    (_npy(np.array([[1], "a"], object)), "truncated or not a .npy file: Array can't be memory-map"),
    (_empty, "no files train/.*bin, train.*bin"),
    (_manifest, "`hvdtrain tokenize` was interrupted"),
    (lambda folder: [], "data.name=tokens needs data.root"),
    (_mixed("data.mixture={wiki: 0, code: 1}"), "the weight of wiki is 0"),
    (_mixed("data.mixture={}"), "data.mixture has no sets"),
    (_mixed("data.mixture={wiki: 1, books: 1}"), "no such file or folder"),
    (_mixed(SMALL, MIXTURE, "data.shuffle=blocks"), "data.mixture decides which sample comes next"),
    (_mixed(SMALL, MIXTURE, "data.sampling=partition"), "any rank may read any set"),
    (_mixed(SMALL, MIXTURE, "data.sample_weights=y"), "both say how often a set is read"),
]


@pytest.mark.parametrize(("write", "text"), MISTAKES, ids=[text for _, text in MISTAKES])
def test_mistakes_are_told(tmp_path: Path, write: Callable[[Path], list[str]], text: str) -> None:
    words = ["data.name=tokens", "task.name=language", *write(tmp_path)]
    with pytest.raises(UserError, match=text) as caught:
        config = configure(None, words)
        refuse_conflicts(config, "single", 1)
        source = build_source(config, "train")
        source.read(np.arange(len(source)))
    assert caught.value.fix and caught.value.where


def test_a_file_that_changes_is_named(tmp_path: Path) -> None:
    source = opened(raw(tmp_path / "a.bin", STREAM), SMALL)
    before = source.identity()
    assert before == opened(tmp_path / "a.bin", SMALL).identity()
    status = os.stat(tmp_path / "a.bin")
    raw(tmp_path / "a.bin", [8, *STREAM[1:]])
    os.utime(tmp_path / "a.bin", ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    with pytest.raises(UserError, match="changed since the job began: its time of") as caught:
        source.read(np.array([0]))
    assert caught.value.where == f"{tmp_path}/a.bin"
    assert opened(tmp_path / "a.bin", SMALL).identity().keys() == before.keys() == {"file a.bin"}
    assert opened(tmp_path / "a.bin", SMALL).identity() != before
    os.truncate(tmp_path / "a.bin", 4)
    with pytest.raises(UserError, match="its size is 4 bytes and was 26"):
        source.read(np.array([0]))
    (tmp_path / "a.bin").unlink()
    with pytest.raises(UserError, match="the file has vanished"):
        source.read(np.array([0]))


def test_shares_are_fractions() -> None:
    parts = parts_of_period([0.1, 0.2, 0.7])
    assert [Fraction(part, sum(parts)) for part in parts] == [
        Fraction(1, 10),
        Fraction(1, 5),
        Fraction(7, 10),
    ]
