"""Archives behind URLs: one complete copy on each machine. The server is on this machine."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from test_webdataset import check, fill, sample, write

from hvdtrain.data.source import Source, Split
from hvdtrain.errors import UserError
from hvdtrain.extras.webdataset import download
from hvdtrain.extras.webdataset.data.datasets import webdataset


class Server(ThreadingHTTPServer):
    """Serves a folder; counts what is asked for, and cuts the first `cut` answers short."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)
        self.asked: Counter[str] = Counter()
        self.cut = 0
        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(SimpleHTTPRequestHandler):
    server: Server

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments, directory=arguments[2].folder)

    def copyfile(self, source: Any, outputfile: Any) -> None:
        self.server.asked[self.path] += 1
        content = source.read()
        if self.server.cut:
            self.server.cut -= 1
            content = content[:700]
        outputfile.write(content)

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    fill(tmp_path / "served")
    with Server(tmp_path / "served") as found:
        thread = threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield found
        found.shutdown()
        thread.join()


def build(
    url: str, cache: Path, split: Split = "train", val: str | None = "../val/b.tar"
) -> Source:
    # as the configuration passes it
    return webdataset.build("webdataset", Path(url), split, cache=cache, val_archives=val)


def test_archives_are_downloaded_once(
    server: Server,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By one of four processes, here threads; and not again at the next start."""
    url = f"{server.url}/train/a-{{000000..000001}}.tar"
    monkeypatch.setattr(download, "_SAID_EVERY_S", 0.0)
    with ThreadPoolExecutor(4) as pool:
        sources = list(pool.map(lambda _: build(url, tmp_path / "cache"), range(4)))
    for source in sources:
        check(source, [1, 2, 3], [0, 2, 1])
    check(build(url, tmp_path / "cache", "val"), [4, 5], [0, 2])
    assert dict(server.asked) == {
        "/train/a-000000.tar": 1,
        "/train/a-000001.tar": 1,
        "/val/b.tar": 1,
    }
    lines = capsys.readouterr().err
    size_mb = sum(path.stat().st_size for path in (tmp_path / "served").rglob("*.tar")) / 1e6
    assert lines.count("downloading ") == 1
    said = [f"downloaded {number} of 3 archives" for number in (1, 2, 3)]
    assert [line for line in lines.splitlines() if line.startswith("downloaded")] == said
    assert f"downloading 3 archives, {size_mb:,.1f} MB, into {tmp_path / 'cache'}" in lines


def test_a_truncated_download_is_tried_again_and_named(server: Server, tmp_path: Path) -> None:
    url = f"{server.url}/train/a-000001.tar"
    server.cut = 2
    check(build(url, tmp_path / "cache", val=None), [3], [1])
    server.cut = 3
    with pytest.raises(
        UserError,
        match=r"the download failed 3 times: it is truncated: 700 of [\d,]+ bytes came\n"
        rf"  where: {server.url}/train/a-000001.tar\n  fix: .*complete archives are kept",
    ):
        build(url, tmp_path / "other", val=None)
    assert [path.suffix for path in (tmp_path / "other").rglob("*a-*")] == []


def test_a_damaged_copy_is_downloaded_again(server: Server, tmp_path: Path) -> None:
    url = f"{server.url}/train/a-000001.tar"
    build(url, tmp_path, val=None)
    (copy,) = (tmp_path / "downloads").rglob("*.tar")
    record = json.loads(copy.with_name(f"{copy.name}.json").read_text())
    assert record["bytes"] == copy.stat().st_size and len(record["blake2b"]) == 64
    copy.write_bytes(copy.read_bytes()[:-512])
    check(build(url, tmp_path, val=None), [3], [1])
    assert server.asked["/train/a-000001.tar"] == 2


@pytest.mark.parametrize(
    ("url", "val", "message"),
    [
        (
            "{}/train/none.tar",
            None,
            r"failed 3 times: .*404.*\n  where: http://127.0.0.1:\d+/train/",
        ),
        (
            "{}/train/",
            None,
            r"does not name archives .tar\n  where: root\n.*-\{000..009\}.tar",
        ),
        ("{}/train/a-000001.tar", "b.zip", r"b.zip does not name archives .tar\n  where: val_arch"),
        ("nonsense://host/a.tar", None, r"nonsense://host/a.tar: .*\n  where: data.root\n"),
    ],
)
def test_what_cannot_be_downloaded_is_named(
    server: Server, tmp_path: Path, url: str, val: str | None, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        build(url.format(server.url), tmp_path, val=val)


def test_a_full_disk_is_noticed_before(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = download.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(download.shutil, "disk_usage", lambda _: usage._replace(free=10))
    with pytest.raises(UserError, match=r"1 archive need .* MB, but 0.0 MB are free"):
        build(f"{server.url}/train/a-000001.tar", tmp_path, val=None)
    assert not server.asked


def test_other_urls_are_read_by_fsspec(tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    archive = write(tmp_path / "a.tar", sample(6, 0))
    with fsspec.open("memory://set/train-0.tar", "wb") as file:
        file.write(archive.read_bytes())
    check(build("memory://set/train-0.tar", tmp_path / "cache", val=None), [6], [0])


def test_names_of_archives(tmp_path: Path) -> None:
    found = list(download.expanded_braces("https://h/{a,b}-{08..10}.tar?sign=1"))
    assert found[:2] == ["https://h/a-08.tar?sign=1", "https://h/a-09.tar?sign=1"]
    assert len(found) == 6 and found[-1] == "https://h/b-10.tar?sign=1"
    assert download.shown("https://me:word@h/a.tar?sign=1") == "https://h/a.tar"
    with pytest.raises(UserError, match=r"data.val_archives needs archives that are named by"):
        build(str(tmp_path), tmp_path, val="b.tar")
