"""A report's page in a real browser: nothing on its console, and no request."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from cluster_packages import need
from PIL import Image
from ranks import HANG_S
from run_events import CONFIG, write
from test_report import FULL, SCRIPT

from hvdtrain.__main__ import main

OUTSIDE = "http://127.0.0.1:9/x.png"  # no server listens there


class Seen(NamedTuple):
    console: list[str]
    requests: set[str]  # addresses asked for, but for those of files and data:
    pixels: np.ndarray


def shown(page: Path, folder: Path, width: int) -> Seen:
    """What Chromium does with a page."""
    folder.mkdir()
    quiet = ["quic", "background-networking", "component-update", "sync", "gpu"]
    options = {
        "user-data-dir": folder,
        "enable-logging": "stderr",
        "log-net-log": folder / "net.json",
        "screenshot": folder / "page.png",
    }
    arguments = [
        *(f"--disable-{name}" for name in quiet),
        *(f"--{name}={value}" for name, value in options.items()),
    ]
    arguments += ["--no-sandbox", "--no-first-run", f"--window-size={width},4000"]
    ran = subprocess.run(
        ["chromium-headless-shell", *arguments, page.absolute().as_uri()],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=True,
        cwd=folder,
    )
    log = json.loads((folder / "net.json").read_text())
    request = log["constants"]["logSourceType"]["URL_REQUEST"]
    asked = {
        event["params"]["url"]
        for event in log["events"]
        if event["source"]["type"] == request and "url" in event.get("params", {})
    }
    with Image.open(folder / "page.png") as picture:
        pixels = np.asarray(picture.convert("RGB")).astype(int)
    return Seen(
        [line for line in ran.stderr.splitlines() if "CONSOLE" in line],
        {url for url in asked if not url.startswith(("file:", "data:"))},
        pixels,
    )


@pytest.mark.cluster
def test_the_page_in_chromium(tmp_path: Path) -> None:
    """At two widths: pictures shown, console empty, no request. Pages that do otherwise are
    caught."""
    need("chromium-headless-shell")
    run = write(tmp_path / SCRIPT.replace("/", "_"), FULL, CONFIG | {"model.name": SCRIPT})
    assert main(["report", str(run), "--to", str(tmp_path / "to")]) == 0
    page = tmp_path / "to" / "report.html"
    for width in (420, 1280):
        seen = shown(page, tmp_path / f"{width}", width)
        assert seen.console == [] and seen.requests == set()
        blue = np.abs(seen.pixels - [0x00, 0x72, 0xB2]).sum(2) < 40
        # the figures' first colour is on none but them
        assert seen.pixels.shape == (4000, width, 3) and blue.sum() > 1000

    loud = tmp_path / "loud.html"
    loud.write_text(
        f'<link rel="icon" href="data:,"><img src="{OUTSIDE}"><script>console.error("a '
        'mistake")</script>'
    )
    seen = shown(loud, tmp_path / "loud", 420)
    assert seen.requests == {OUTSIDE} and any("a mistake" in line for line in seen.console)

    # had text escaped the escaping, the content security policy would still stop it
    broken_out = tmp_path / "broken_out.html"
    broken_out.write_text(
        page.read_text().replace(
            "</main>", f'<img src="{OUTSIDE}"><script>console.error("a mistake")</script></main>'
        )
    )
    seen = shown(broken_out, tmp_path / "broken_out", 420)
    assert seen.requests == set() and not any("a mistake" in line for line in seen.console)
    assert sum("Content Security Policy" in line for line in seen.console) == 2
