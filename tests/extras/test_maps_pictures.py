"""Masks and maps for the report: pixels of pictures beside those of the data and of predict, on
several ranks, in a job."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import own_data
import pytest
from PIL import Image
from rank_threads import in_threads
from ranks import needs_extra

import hvdtrain
from hvdtrain.__main__ import main
from hvdtrain.comm.communicator import Communicator, SingleProcessCommunicator
from hvdtrain.config.read import configure
from hvdtrain.core.folder import Folder
from hvdtrain.data.grid import Grid, GridVariable
from hvdtrain.events.log import Log
from hvdtrain.extras.maps.shown_maps import (
    MapSamples,
    begins_in_the_south,
    part_of_maps,
    picture_of_maps,
)
from hvdtrain.extras.maps.shown_masks import Masks, palette, picture
from hvdtrain.training.build import build_learner
from hvdtrain.training.datasets import open_datasets
from hvdtrain.training.health.heartbeat import Heartbeat
from hvdtrain.training.samples import SampleSeries
from hvdtrain.training.start import begin

UNET = [
    "model.name=unet",
    "model.widths=[4,6]",
    "model.norm=group",
    "model.groups=2",
    "batch.size=8",
]
WORDS = ["data.name=own_data:shapes", "task.name=segmentation", "task.ignore_label=255", *UNET]


def tiles_of(page: np.ndarray, samples: int, side: int) -> np.ndarray:
    """(samples, 3, side, side, 3) of a picture of small square images; lines of text have 20
    pixels, gaps 6."""
    factor = 192 // side
    rows = [40 + row * (20 + 192 + 6) for row in range(samples)]
    columns = [column * (192 + 6) for column in range(3)]
    return np.array(
        [[page[y : y + 192 : factor, x : x + 192 : factor] for x in columns] for y in rows]
    )


def test_each_pixel_has_the_colour_of_its_class() -> None:
    data = own_data.shapes("val")
    random = np.random.default_rng(1)
    said = random.integers(0, 3, (2, 16, 16))
    page = picture(Masks(np.array([3, 4]), data["x"][3:5], data["y"][3:5], said, 255))
    images, true, model = tiles_of(page, 2, 16).transpose(1, 0, 2, 3, 4)
    colours = np.array([[0, 0, 0], [128, 0, 0], [0, 128, 0]], np.uint8)
    assert np.array_equal(images, data["x"][3:5]) and np.array_equal(model, colours[said])
    has_class = data["y"][3:5] != 255
    assert (
        np.array_equal(true[has_class], colours[data["y"][3:5][has_class]])
        and (true[~has_class] == 205).all()
    )
    legend = {tuple(pixel) for pixel in page[-20:].reshape(-1, 3).tolist()}
    assert {*map(tuple, colours.tolist()), (205, 205, 205)} <= legend


def test_floats_are_grey_from_the_least_to_the_largest_and_large_images_smaller() -> None:
    x = np.linspace(-3.0, 5.0, 2 * 1000 * 600).reshape(1, 2, 1000, 600)
    y = np.arange(600)[None, None, :].repeat(1000, 1) // 300 * 299
    page = picture(Masks(np.array([0]), x, y, y, None))
    assert page.shape == (20 + 20 + 334 + 6 + 22, 3 * 206 - 6, 3), "every third pixel"
    assert (
        page[40:374, :200].min() == 0
        and page[40:374, :200].max() == 255
        and np.ptp(page[40:374, :200], 2).max() == 0
    )
    assert np.array_equal(page[40, 206], palette()[0]) and np.array_equal(
        page[40, 405], palette()[299 - 256]
    )


def test_ranks_make_one_picture_of_their_masks(tmp_path: Path) -> None:
    """Of two samples a third rank has none."""
    config = configure(None, [*WORDS, "log.samples=2", "speed.precision=fp64"])
    datasets = open_datasets(config)
    first: Any = build_learner(config, datasets.task, SingleProcessCommunicator())
    weights = first.state()

    def drawn(rank: Communicator) -> None:
        learner: Any = build_learner(config, datasets.task, rank)
        learner.load(weights)
        (run := tmp_path / f"{rank.size}").mkdir(exist_ok=True)
        health: Any = None  # of sequences alone
        series = SampleSeries(
            config,
            datasets.task,
            datasets.val,
            rank,
            learner,
            Heartbeat(),
            health,
            Log([]),
            run=run,
            open_run=Folder.open,
        )
        series.draw(begin(config, datasets))

    for size in (1, 3):
        in_threads(size, drawn)
    one, three = (tmp_path / size / "samples" / "masks-00000000.png" for size in "13")
    assert one.read_bytes() == three.read_bytes()
    shown = tiles_of(np.asarray(Image.open(io.BytesIO(one.read_bytes()))), 2, 16)
    data = own_data.shapes("val")
    said = first.predict(
        first.to_device({name: array[[0, 11]] for name, array in data.items()})
    ).outputs.argmax(1)
    assert np.array_equal(shown[:, 0], data["x"][[0, 11]]) and np.array_equal(
        shown[:, 2], palette()[said]
    )


@needs_extra("trained_models")
def test_a_job_ends_with_a_picture_and_has_more_of_them_where_it_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for run, word in (
        ("usual", "log.samples=null"),
        ("more", "log.samples=99"),
        ("none", "log.samples=0"),
    ):
        assert (
            main([*WORDS, word, "epochs=2", "optim.ema=0.5", "optim.base_lr=0.3", f"run={run}"])
            == 0
        )
    found = {
        run: sorted(path.name for path in (tmp_path / run).glob("samples/*"))
        for run in ("usual", "more", "none")
    }
    names = [f"masks-{step:08}.png" for step in (0, 5, 10)]
    assert found == {"usual": names[-1:], "more": names, "none": []}
    assert (
        '"kind": "samples", "step": 5, "count": 12,'
        in (tmp_path / "more" / "events.jsonl").read_text()
    ), "all of them"
    events = [
        json.loads(line) for line in (tmp_path / "usual" / "events.jsonl").read_text().splitlines()
    ]
    assert [(event["step"], event["count"]) for event in events if event["kind"] == "samples"] == [
        (10, 4)
    ]
    shown = tiles_of(np.asarray(Image.open(tmp_path / "usual" / "samples" / names[-1])), 4, 16)
    # by the averaged weights, too
    said = hvdtrain.predict("usual", own_data.shapes("val")["x"]).argmax(1)
    assert np.array_equal(shown[:, 2], palette()[said[[0, 3, 7, 11]]])
    assert (
        main([*WORDS, "epochs=2", "optim.ema=0.5", "optim.base_lr=0.3", "resume=auto", "run=usual"])
        == 0
    ), "it is over"


def test_rows_that_begin_in_the_south_are_known_by_their_coordinates() -> None:
    def grid(first: float, last: float, units: str = "degrees_north", turned: bool = False) -> Grid:
        axes = ("time", "x", "y") if turned else ("time", "y", "x")
        return Grid(
            axes,
            (5, 2, 2),
            (
                GridVariable("lat", ("y",), np.array([first, last]), {"units": units}),
                GridVariable("lon", ("x",), np.array([0.0, 1.0]), {"units": "degrees_east"}),
            ),
        )

    assert begins_in_the_south(grid(-80, 80)) and not begins_in_the_south(grid(80, -80))
    assert not begins_in_the_south(grid(-80, 80, "m"))
    assert not begins_in_the_south(grid(-80, 80, turned=True))
    assert not begins_in_the_south(None)


def test_a_picture_of_maps_has_their_colours() -> None:
    true = np.array([[0.0, 10.0], [5.0, np.nan]])[None, None]
    said = np.array([[0.0, 12.0], [1.0, 3.0]])[None, None]
    page = picture_of_maps(MapSamples(np.array([7]), true, said, ("t",)))
    tiles = [page[48:240, x : x + 192][48::96, 48::96] for x in (8, 206, 404)]
    assert tiles[0].tolist() == [[[68, 1, 84], [253, 231, 37]], [[33, 145, 140], [205] * 3]]
    assert tiles[1][0].tolist() == [[68, 1, 84], [253, 231, 37]]
    assert tiles[2].tolist() == [[[247] * 3, [244, 165, 130]], [[33, 102, 172], [205] * 3]]
    bars = page[250, [8, 397, 404, 499, 595]].tolist()
    assert bars == [[68, 1, 84], [253, 231, 37], [33, 102, 172], bars[3], [178, 24, 43]]
    assert part_of_maps(np.zeros((1, 5, 1000, 600))).shape == (1, 3, 334, 200)
