"""data.name=image_tokens: the tokens of images, the codebook that all ranks share, and what is
refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from ranks import needs_extra

from hvdtrain.config.read import configure
from hvdtrain.data.datasets import digits, synthetic
from hvdtrain.errors import UserError
from hvdtrain.extras.image_tokens.codebook import (
    Codebook,
    from_json,
    read_codebook,
    reduce_images,
    to_json,
)
from hvdtrain.extras.image_tokens.data.datasets import image_tokens
from hvdtrain.extras.image_tokens.images import TokenImages
from hvdtrain.training.data_facts import identity
from hvdtrain.training.datasets import build_source, open_datasets

WORDS = ["data.name=image_tokens", "task.name=language"]


def test_the_tokens_are_a_start_and_the_nearest_colours() -> None:
    train, val, task, _ = open_datasets(configure(None, [*WORDS, "data.colours=5", "data.side=4"]))
    assert isinstance(train, TokenImages) and isinstance(val, TokenImages)
    assert (len(train), len(val), train.start) == (1437, 360, 5)
    assert train.codebook.digest() == val.codebook.digest()
    assert task.sizes["context"] == 16 and task.sizes["vocabulary"] == 6
    for split, source in (("train", train), ("val", val)):
        images = (
            reduce_images(digits.build("digits", None, split).read(np.array([0, 7, 300]))["x"], 4)
            .reshape(3, 16)
            .astype(int)
        )  # type: ignore[arg-type]
        tokens = source.read(np.array([0, 7, 300]))["tokens"]
        assert tokens.dtype == np.int64 and tokens.shape == (3, 17)
        assert (tokens[:, 0] == 5).all()
        distances = np.abs(images[..., None] - train.codebook.colours[:, 0].astype(int))
        assert np.array_equal(tokens[:, 1:], distances.argmin(2))


def test_three_channels_of_another_source_with_its_options() -> None:
    words = [
        "data.source=synthetic",
        "data.source_options={samples: 20, val_samples: 8, shape: [4, 4, 3]}",
        "data.colours=300",
        "batch.size=8",
    ]
    train, val, *_ = open_datasets(configure(None, [*WORDS, *words]))
    assert isinstance(train, TokenImages)
    assert train.pixels.dtype == np.uint16 and (len(train), len(val)) == (20, 8)
    images = synthetic.build("synthetic", None, "train", samples=20, shape=(4, 4, 3)).read(
        np.arange(20)
    )["x"]
    decoded = train.codebook.decode(train.read(np.arange(20))["tokens"][:, 1:]).reshape(
        images.shape
    )
    assert np.abs(decoded.astype(int) - images).mean() < 12


def test_a_part_for_validation_has_the_codebook_too() -> None:
    train, val, *_ = open_datasets(configure(None, [*WORDS, "data.val_share=0.1"]))
    assert len(train) + len(val) == 1437 and len(val) == 144
    codebook = train.pictures
    assert codebook is not None and val.pictures is codebook
    assert list(train.run_files) == ["codebook.json"]


def test_a_checkpoint_knows_the_codebook() -> None:
    found = {}
    for colours in (4, 5):
        config = configure(None, [*WORDS, f"data.colours={colours}"])
        found[colours] = identity(config, open_datasets(config))["data"]["codebook"]
    assert found[4] != found[5] and len(found[4]) == 16


def test_the_file_of_a_run_folder(tmp_path: Path) -> None:
    codebook = Codebook(np.array([[0, 1, 2], [255, 254, 3]], np.uint8))
    files = TokenImages(np.zeros((1, 1), np.uint8), codebook).run_files
    (tmp_path / "codebook.json").write_bytes(files["codebook.json"])
    assert json.loads((tmp_path / "codebook.json").read_text()) == {
        "colours": [[0, 1, 2], [255, 254, 3]]
    }
    assert np.array_equal(read_codebook(tmp_path).colours, codebook.colours)
    (tmp_path / "codebook.json").unlink()
    with pytest.raises(UserError, match="the codebook cannot be read: No such file"):
        read_codebook(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        *(
            b"",
            b"{",
            b"[]",
            b"3",
            b"[" * 100_000,
            b'{"colours": 3}',
            b'{"colours": [[1]]}',
            b'{"colours": [[1], [2, 3]]}',
        ),
        *(
            b'{"colours": [[1.5], [2]]}',
            b'{"colours": [[-1], [2]]}',
            b'{"colours": [[256], [2]]}',
            b'{"colours": [["a"], ["b"]]}',
        ),
    ],
)
def test_a_damaged_codebook_is_refused(content: bytes) -> None:
    with pytest.raises(UserError, match="the codebook is damaged"):
        from_json(content, "here")
    assert from_json(
        to_json(Codebook(np.array([[1], [2]], np.uint8))), "here"
    ).colours.tolist() == [[1], [2]]


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["data.side=3"], "data.side=3 does not divide 8 pixels"),
        (["data.colours=18"], "the pixels have 17 colours; data.colours=18 asks for more"),
        (["data.colours=1"], "1 colours are impossible"),
        (["data.source=image_tokens"], "data.source=image_tokens is not a data set of images"),
        (["data.source=text", "data.root=x"], "no such file|cannot be read|has no images"),
        (
            ["data.source=synthetic", "data.source_options={shape: [4, 6, 3]}"],
            "images of 4x6x3 cannot be converted to tokens",
        ),
        (
            ["data.source=synthetic", "data.source_options={sample: 4}"],
            "data.name=synthetic has no option sample",
        ),
        (
            ["data.source_options={root: x}"],
            "root is a key of data, not an option of data.source=digits",
        ),
        pytest.param(
            ["data.stage=/tmp"],
            "image_tokens reads its files only once",
            marks=needs_extra("staging"),
        ),
        (["augment.flip=true"], "augmentation needs images"),
    ],
)
def test_what_is_refused(words: list[str], what: str) -> None:
    with pytest.raises(UserError, match=what):
        open_datasets(configure(None, [*WORDS, *words]))


def test_an_error_of_an_option_of_the_source_names_the_key() -> None:
    words = [*WORDS, "data.source=synthetic", "data.source_options={samples:0}"]
    with pytest.raises(UserError) as caught:
        open_datasets(configure(None, words))
    assert caught.value.where == "data.source_options, command line"


def test_images_are_refused_by_the_model_of_tokens() -> None:
    assert isinstance(
        image_tokens.build("image_tokens", None, "val").images,
        type(digits.build("digits", None, "val")),
    )
    assert len(build_source(configure(None, [*WORDS, "data.colours=4"]), "val")) == 360
