"""The report's rows of samples: in the order of the steps, escaped, and only of what is a picture
or a text."""

from __future__ import annotations

import base64
from pathlib import Path

import numpy as np
from run_events import COMPLETE, CONFIG, write
from test_report import SCRIPT, PageParser

from hvdtrain.extras.report.page import MOST_BYTES, SAMPLE_KINDS, evenly, read_samples, render_page
from hvdtrain.records.run import read_run
from hvdtrain.training.samples import png

PICTURE = png(np.zeros((4, 4, 3), np.uint8))


def run_with(folder: Path, files: dict[str, bytes]) -> Path:
    write(folder, COMPLETE, CONFIG)
    (folder / "samples").mkdir()
    for name, data in files.items():
        (folder / "samples" / name).write_bytes(data)
    return folder


def page_of(folder: Path) -> str:
    return render_page([read_run(folder)], ["r0"], [], "command")


def test_a_row_for_each_step(tmp_path: Path) -> None:
    files = {
        "step-00000020.png": PICTURE,
        "step-00000000.png": PICTURE,
        "step-00000010.txt": f"{SCRIPT}\nab".encode(),
    }
    page = page_of(run_with(tmp_path / "run", files))
    seen = PageParser(page)
    rows = [
        seen.text.index(row)
        for row in (
            "step 0",
            "step 10: validation accuracy 70.00%",
            "step 20: validation accuracy 60.00%",
        )
    ]
    assert rows == sorted(rows) and "What the model draws" in seen.text
    pictures = [attrs for tag, attrs in seen.tags if tag == "img"]
    assert [attrs["src"] for attrs in pictures] == [
        f"data:image/png;base64,{base64.b64encode(PICTURE).decode()}"
    ] * 2
    assert SCRIPT not in page and SCRIPT in seen.text


def test_what_is_no_sample_is_left_out(tmp_path: Path) -> None:
    files = {
        "step-00000001.png": b"<svg onload=alert(1)>",
        "step-00000002.txt": b"x" * (MOST_BYTES + 1),
        "step-2.png": PICTURE,
        "other.png": PICTURE,
        "step-00000003.txt": b"\xff",
        "other-00000003.png": PICTURE,
    }
    run = run_with(tmp_path / "run", files)
    (run / "samples" / "step-00000004.txt").symlink_to("/etc/hostname")
    assert [
        (row.title, row.url, row.text) for row in read_samples(read_run(run), SAMPLE_KINDS[0])
    ] == [("step 3", "", "\N{REPLACEMENT CHARACTER}")]
    assert "What the model draws" not in page_of(write(tmp_path / "none", COMPLETE, CONFIG))


def test_masks_have_a_part_of_their_own(tmp_path: Path) -> None:
    files = {f"masks-{step:08}.png": PICTURE for step in range(10, 60, 10)} | {
        "step-00000010.png": PICTURE
    }
    seen = PageParser(page_of(run_with(tmp_path / "run", files)))
    pictures = [attrs["alt"] for tag, attrs in seen.tags if tag == "img"]
    shown = ["step 10: validation accuracy 70.00%", "step 30", "step 50"]
    assert pictures[1:] == [f"images, their masks and the model's masks, {step}" for step in shown]
    assert seen.text.index("What the model draws") < seen.text.index("Masks")


def test_of_many_steps_the_first_the_last_and_some_between() -> None:
    items = [(step, f"{step}") for step in range(100)]
    steps = [step for step, _ in evenly(items, 12)]
    assert len(steps) == 12 and steps[0] == 0 and steps[-1] == 99
    gaps = np.diff(steps)
    assert gaps.min() >= 8 and gaps.max() <= 10
    assert evenly(items[:3], 12) == items[:3]
