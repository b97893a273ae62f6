"""`tokenize`: tokens of each kind of file, the same bytes on any number of ranks and after kills;
and jobs on its files on ranks, resumed on another number of them."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import token_jobs
from combinations import OF_CHATS
from pool import alone
from ranks import Job, mpirun, needs_mpirun
from waiting import wait_until

from hvdtrain.__main__ import main
from hvdtrain.config.read import configure
from hvdtrain.data.tokenizer import read_tokenizer
from hvdtrain.errors import DONE, USER, UserError
from hvdtrain.extras.tokens.command import USAGE, tokenize
from hvdtrain.extras.tokens.inputs import check_unchanged, find_inputs
from hvdtrain.extras.tokens.manifest import read_manifest
from hvdtrain.training.datasets import build_source


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def documents(folder: Path) -> list[list[int]]:
    """The documents of a folder that `tokenize` wrote, by numpy alone."""
    found: list[list[int]] = []
    for path in sorted(folder.glob("*.bin")):
        index = path.with_suffix(".idx").read_bytes()
        count = int(np.frombuffer(index, "<u8", 1, 18)[0])
        tokens = np.fromfile(path, {8: "<u2", 4: "<i4"}[index[17]])
        lengths = np.frombuffer(index, "<i4", count, 34)
        found += [part.tolist() for part in np.split(tokens, np.cumsum(lengths)[:-1])]
    return found


def test_the_documents_of_each_kind_of_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = token_jobs.texts(tmp_path)
    assert token_jobs.tokenized(tmp_path / "bytes", files) == DONE
    lines = Path(files[2]).read_text().split("\n")
    texts = [Path(files[0]).read_text()]
    texts += [json.loads(line)["text"] for line in lines if line]
    expected = [[*text.encode(), 256] for text in texts if text]
    assert documents(tmp_path / "bytes") == expected
    manifest = read_manifest(tmp_path / "bytes")
    assert manifest is not None and len(manifest.shards) > 4
    assert (manifest.vocabulary, manifest.end, manifest.dtype) == (257, 256, "uint16")
    total = sum(map(len, expected))
    shown = capsys.readouterr().out
    assert f"wrote {total:,} tokens of {len(expected):,} documents" in shown
    before = content(tmp_path / "bytes")
    assert token_jobs.tokenized(tmp_path / "bytes", files) == DONE
    assert "nothing to do" in capsys.readouterr().out and content(tmp_path / "bytes") == before
    job = ["data.name=tokens", f"data.root={tmp_path}/bytes", "data.context=10"]
    source = build_source(configure(None, [*job, "task.name=language"]), "train")
    stream = [token for document in expected for token in document]
    assert source.read(np.array([7]))["tokens"].tolist() == [stream[70:81]]
    whole = configure(None, [*job[:2], "task.name=language", "data.documents=true"])
    assert build_source(whole, "train").read(np.array([5]))["tokens"].tolist() == [expected[5]]


def test_tokenizers_tables_and_folders(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    (tmp_path / "in" / "deep").mkdir(parents=True)
    (tmp_path / "in" / "deep" / "z.md").write_text("c b a")
    rows = ["a b", "", "c c c", "b"]
    table = pyarrow.table({"body": rows, "n": [1, 2, 3, 4]})
    pyarrow.parquet.write_table(table, tmp_path / "in" / "a.parquet", row_group_size=3)
    (tmp_path / "in" / "b.ndjson").write_text('{"body": "a"}\n  \n{"body": "b c"}')
    (tmp_path / "in" / "ignored.csv").write_text("x")
    words = ["--tokenizer", f"{OF_CHATS}", "--text", "body", f"{tmp_path}/in"]
    assert token_jobs.tokenized(tmp_path / "out", words) == DONE
    tokenizer = read_tokenizer(OF_CHATS)
    end = tokenizer.number("[EOS]")
    texts = ["a b", "c c c", "b", "a", "b c", "c b a"]
    assert documents(tmp_path / "out") == [[*tokenizer.encode(text), end] for text in texts]
    manifest = read_manifest(tmp_path / "out")
    assert manifest is not None
    assert (manifest.tokenizer, manifest.tokenizer_digest, manifest.vocabulary) == (
        "tokenizer.json",
        tokenizer.digest,
        tokenizer.vocabulary,
    )
    assert token_jobs.tokenized(tmp_path / "plain", words, "--end", "none") == DONE
    assert documents(tmp_path / "plain") == [tokenizer.encode(text) for text in texts]
    token_jobs.tokenized(tmp_path / "bytes", [f"{tmp_path}/in/deep"])
    mixture = ["data.name=tokens", f"data.root={tmp_path}", 'data.mixture={"out":1,"bytes":1}']
    for words, text in (
        ([], "bytes has a vocabulary of 257 tokens, and out one of"),
        (["data.vocabulary=999"], "bytes and out were written with different tokenizers"),
    ):
        job = configure(None, [*mixture, "data.context=2", "task.name=language", *words])
        with pytest.raises(UserError, match=text):
            build_source(job, "train")


def test_a_command_that_is_killed_continues(tmp_path: Path) -> None:
    files = token_jobs.texts(tmp_path)
    token_jobs.tokenized(tmp_path / "one", files)
    expected = content(tmp_path / "one")
    to = tmp_path / "killed"
    argv = ["-m", "hvdtrain", "tokenize", "--to", f"{to}", "--shard-mb", "0.002", *files]
    kept: dict[str, int] = {}
    for count in (1, 3, 5):
        with Job(0, argv, is_warm=True) as job:
            wait_until(
                lambda count=count: (
                    len(list(to.glob("tokens-*.json"))) >= count  # type: ignore[misc]
                    or not job.is_running()
                ),
                f"{count} files",
            )
            for pid in job.processes():
                os.kill(pid, signal.SIGKILL)
            job.wait()
        for name, time_ns in kept.items():  # no finished file is written again
            assert (to / name).stat().st_mtime_ns == time_ns
        records = [path.with_suffix(".bin") for path in to.glob("tokens-*.json")]
        kept |= {path.name: path.stat().st_mtime_ns for path in records if path.exists()}
    (to / ".tokens-00001.bin.0123456789abcdef.unfinished").write_bytes(b"of a killed process")
    assert token_jobs.tokenized(to, files) == DONE
    assert content(to) == expected


@pytest.mark.in_turn
@needs_mpirun
def test_ranks_write_the_same_bytes_and_train_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches of windows, of a mixture and of packed documents; jobs of two and three ranks are
    resumed in one process."""
    monkeypatch.chdir(tmp_path)
    files = token_jobs.texts(tmp_path)
    names = [Path(file).name for file in files]
    assert token_jobs.tokenized(Path("on-1"), names) == DONE
    token_jobs.tokenized(Path("tokens/wiki"), names)
    token_jobs.tokenized(Path("tokens/code"), names[:1])
    for size, kinds in {2: ["windows", "mixture"], 3: ["mixture", "packed"], 4: []}.items():
        done = mpirun(size, alone("token_jobs:on_ranks", str(tmp_path), *kinds))
        assert done.returncode == 0, done.stdout + done.stderr
        assert content(tmp_path / f"on-{size}") == content(tmp_path / "on-1")
        for kind in kinds:
            one = token_jobs.trained(kind, f"{kind}-1-{size}")
            resumed = token_jobs.trained(kind, f"{kind}-stopped-{size}")
            found = np.load(f"{kind}-{size}.npz")
            for name, array in one.items():
                for other in (found[name], resumed[name]):
                    np.testing.assert_allclose(
                        other, array, rtol=0, atol=1e-12, err_msg=f"{kind} {size} {name}"
                    )
        if kinds == ["mixture", "packed"]:
            assert "mixed by data.mixture: the job reads epochs of each set" in done.stdout
    with pytest.raises(UserError, match="another data.shuffle: 'data.mixture code 3, wiki 7"):
        token_jobs.trained("mixture", "mixture-2", "data.mixture={wiki: 1, code: 1}")
    path = Path("tokens/wiki/tokens-00000.bin")
    changed = bytearray(path.read_bytes())
    changed[0] ^= 1
    path.write_bytes(changed)
    with pytest.raises(UserError, match="changed since `hvdtrain tokenize` wrote it"):
        token_jobs.trained("windows", "windows-2")


# --- what is refused --------------------------------------------------------------------------


def failed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["tokenize", *words]) == USER
    return capsys.readouterr().err


def test_mistakes_of_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tokenize(["--help"]) == DONE and USAGE in capsys.readouterr().out
    to = ["--to", f"{tmp_path}/out"]
    for words, text in (
        (["a.txt"], "--to DIR is missing"),
        (to, "FILES are missing"),
        ([*to, "--shard-mb", "no", "a.txt"], "--shard-mb no is not a number"),
        ([*to, "--vocab", "a.txt"], "unknown argument '--vocab'"),
    ):
        assert text in failed(capsys, *words)


def test_mistakes_in_the_inputs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    inputs: dict[str, Any] = {
        "a.csv": (b"x", "files .csv are not supported"),
        "none.txt": (None, "the file cannot be read: No such file"),
        "latin.txt": (b"caf\xe9", "byte 3 is not UTF-8"),
        "empty.txt": (b"", "the inputs have no text"),
        "list.jsonl": (b'{"text": "a"}\n[1]\n', "the line at byte 14"),
        "json.jsonl": (b"{'text': 1}\n", "the line is not JSON"),
        "field.jsonl": (b'{"texts": "a"}\n', "the record has no field text; it has texts"),
        "number.jsonl": (b'{"text": 3}\n', "field text is 3, expected text"),
        "half.jsonl": (b'{"text": "\\ud800"}\n', "\\ud800, which is half of a character"),
        "table.parquet": (b"PAR1", "the Parquet file is damaged"),
    }
    for name, (data, text) in inputs.items():
        if data is not None:
            (tmp_path / name).write_bytes(data)
        shown = failed(capsys, "--to", f"{tmp_path}/of-{name}", f"{tmp_path}/{name}")
        assert text in shown and "fix:" in shown, shown
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table({"body": ["a"]})
    pyarrow.parquet.write_table(table, tmp_path / "body.parquet")
    (tmp_path / "large.txt").write_bytes(b"")
    os.truncate(tmp_path / "large.txt", 2**30 + 1)
    (tmp_path / "a.txt").write_text("a b")
    (tmp_path / "taken" / "tokens-00000.bin").mkdir(parents=True)
    for to, name, text in (
        ("out", "body.parquet", "the table has no column text; it has body"),
        ("out", "large.txt", "a text of 1,073,741,825 bytes is one document"),
        ("taken", "a.txt", "file 0 of tokens cannot be written: "),
        ("a.txt/out", "a.txt", "the folder cannot be used: "),
    ):
        assert text in failed(capsys, "--to", f"{tmp_path}/{to}", f"{tmp_path}/{name}")
    found = find_inputs([f"{tmp_path}/a.txt"])
    (tmp_path / "a.txt").write_text("a b c")
    with pytest.raises(UserError, match="the file has changed since the command began"):
        check_unchanged(found[0])
    (tmp_path / "folder").mkdir()
    assert "the folder has no files .txt" in failed(
        capsys, "--to", f"{tmp_path}/out", f"{tmp_path}/folder"
    )
    (tmp_path / "a.txt").write_text("a b")
    words = ["--to", f"{tmp_path}/out", f"{tmp_path}/a.txt"]
    assert "the tokenizer has no token </x>" in failed(
        capsys, *words, "--tokenizer", f"{OF_CHATS}", "--end", "</x>"
    )
    assert "--end </s> needs a tokenizer" in failed(capsys, *words, "--end", "</s>")


def test_a_folder_of_other_inputs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text(name * 50)
    to = tmp_path / "out"
    assert token_jobs.tokenized(to, [f"{tmp_path}/a.txt"]) == DONE
    words = ["--to", f"{to}", "--shard-mb", "0.002", f"{tmp_path}/b.txt"]
    assert "the folder has files of tokens of other inputs or options" in failed(capsys, *words)
    assert main(["tokenize", *words, "--force"]) == DONE
    assert documents(to) == [[*b"b" * 50, 256]]
    options = ["data.name=tokens", f"data.root={to}", "data.context=5", "task.name=language"]
    job = configure(None, options)
    small = configure(None, [*options, "data.vocabulary=200"])
    with pytest.raises(UserError, match="out was written with bytes, which has 257 tokens"):
        build_source(small, "train")
    path = to / "tokens-00000.bin"
    whole = path.read_bytes()
    path.write_bytes(b"\0" * len(whole))
    with pytest.raises(UserError, match="the file has changed since `hvdtrain tokenize` wrote it"):
        build_source(job, "train").identity()
    path.write_bytes(whole[:-2])
    with pytest.raises(UserError, match="truncated: it has 100 bytes, and `hvdtrain tokenize`"):
        build_source(job, "train")
    assert "lists tokens-00000.bin with 102 bytes, but it has 100" in failed(capsys, *words)
    (to / "tokens.json").rename(to / "kept")
    (to / "tokens-00007.json").write_text('{"settings": "of another command"}')
    assert "the folder has files of tokens of other inputs or options" in failed(capsys, *words)
    (to / "tokens-00007.json").unlink()
    (to / "tokens-mine.bin").write_bytes(b"the user's")  # is not removed
    (to / "kept").rename(to / "tokens.json")
    path.write_bytes(whole)
    assert main(["tokenize", *words]) == DONE
    (to / "tokens-mine.bin").unlink()
    (to / "other.bin").write_bytes(whole)
    with pytest.raises(UserError, match="tokens.json does not list the file other.bin"):
        build_source(job, "train")
    (to / "other.bin").unlink()
    path.rename(to / "renamed.npy")
    with pytest.raises(UserError, match="1 of 1 files are missing: tokens-00000.bin"):
        build_source(job, "train")
    manifest = (to / "tokens.json").read_text()
    for old, new, text in (
        ("hvdtrain tokens 1", "hvdtrain tokens 9", "format 'hvdtrain tokens 9', expected"),
        ('"tokens-00000.bin"', '"../a.bin"', "the file is damaged: ValueError ../a.bin is outside"),
        ("{", "[", "cannot be read as JSON"),
    ):
        (to / "tokens.json").write_text(manifest.replace(old, new, 1))
        with pytest.raises(UserError, match=text):
            build_source(job, "train")
