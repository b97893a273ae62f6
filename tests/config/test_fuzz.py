"""Hostile inputs: each is a UserError. A fuzz run of every reader, and a test for each input that
such runs found.

FUZZ_SECONDS=600 pytest tests/config/test_fuzz.py -s -k every_reader: longer, from a new seed that
is printed (FUZZ_SEED=n gives it again).
"""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from os import system  # a name of this module for a part of Python
from pathlib import Path

import fuzzing
import pytest
from fuzz_readers import READERS
from numpy.random import Generator

from hvdtrain.config import plugins
from hvdtrain.config.read import configure, to_yaml
from hvdtrain.errors import UserError

SUPPORT = Path(__file__).parents[1] / "support"
SECONDS = float(os.environ.get("FUZZ_SECONDS", "15"))
linux = pytest.mark.skipif(sys.platform != "linux", reason="counts memory in /proc")


class Bare(dict[str, int]):
    """A class whose constructor has no signature."""


def faults(rng: Generator, home: Path) -> dict[str, Callable[[], object]]:
    """What a reader must not do, by name."""
    return {
        "raises": lambda: int("x"),
        "hangs": lambda: time.sleep(2000),
        "eats": lambda: bytearray(2**33),
        "hides": hides_memory,
        "starts": lambda: subprocess.run(["true"], check=True),
        "shells": lambda: system("true"),
        "runs": lambda: exec("import os"),
        "calls": lambda: socket.create_connection(("127.0.0.1", 9)),
        "writes": lambda: (home.parent / "outside").write_text(""),
        "follows": lambda: (
            (home / "link").symlink_to(home.parent / "outside") or (home / "link").write_text("")
        ),
        "removes": lambda: os.rename(home.parent / "now", home / "now"),
        "looks": lambda: Path("/etc/passwd").read_text(),
        "prints_secret": lambda: refuse(os.environ["SECRET"]),
        "floods": lambda: refuse("x" * 9999),
        "dies": lambda: os.kill(os.getpid(), 9),
    }


def refuse(what: str) -> None:
    raise UserError(what, "here")


def hides_memory() -> None:
    try:
        bytearray(2**33)
    except MemoryError as error:
        raise UserError("a message", "here") from error


SEEN = {
    **dict.fromkeys(
        ("starts", "shells", "runs", "calls", "writes", "follows", "removes", "looks"), "Forbidden"
    ),
    **{
        "raises": "ValueError",
        "hangs": "Timeout (0:00:02)!",
        "eats": "MemoryError",
        "hides": "out of memory",
        "dies": "ended with -9",
    },
    **{"prints_secret": "or with a secret", "floods": "a message of"},
}


@pytest.mark.in_turn
@linux
@pytest.mark.parametrize("fault", SEEN)
def test_the_fuzzer_reports(fault: str) -> None:
    limit_s = 2 if fault == "hangs" else fuzzing.LIMIT_S
    found = fuzzing.fuzz(
        Path(__file__), (fault,), seed=1, seconds=0.01, limit_s=limit_s, most=1
    ).findings
    assert found and found[0].startswith(f"{fault} 0: ") and SEEN[fault] in found[0], found


@linux
@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 1000)
def test_every_reader_refuses_or_reads(capsys: pytest.CaptureFixture[str]) -> None:
    seed = int(
        os.environ.get("FUZZ_SEED", secrets.randbits(32) if "FUZZ_SECONDS" in os.environ else 1)
    )
    # here on a machine of any speed
    limit_s = fuzzing.LIMIT_S * (1 if "FUZZ_SECONDS" in os.environ else 10)
    report = fuzzing.fuzz(
        SUPPORT / "fuzz_readers.py", tuple(READERS), seed, SECONDS, limit_s, least=40
    )
    with capsys.disabled():
        print(f"\nseed {seed}, {SECONDS:.0f} s\n{report}")
    assert not report.findings, "\n\n".join(report.findings)
    for name, tally in report.tallies.items():
        assert tally.read and tally.refused and tally.read + tally.refused == tally.tried, (
            f"{name}: {tally}"
        )


def laughs(form: str, levels: int) -> str:
    """A billion laughs: each level has the aliases of the level before twice, or nine times."""
    rows = (f"  l{n}: &l{n} {form.replace('@', f'*l{n - 1}')}\n" for n in range(1, levels))
    return "model:\n  l0: &l0 {a: 1}\n" + "".join(rows)


def refers(first: str, form: str) -> str:
    return f"model:\n  l0: {first}\n" + "".join(
        f"  l{n}: {form.replace('@', f'${{model.l{n - 1}}}')}\n" for n in range(1, 31)
    )


ONLY = (
    "only the value of another key is looked up, as in ${batch.size}, never the environment or a "
    "file"
)
CONFIGURATIONS = [
    ("run: ${oc.env:SECRET}", f"cannot read the value of run: ${{oc.env:SECRET}}: {ONLY}", ":1"),
    (
        "model.widths: [1, '${oc.env:SECRET}']",
        f"cannot read the value of model.widths: ${{oc.env:SECRET}}: {ONLY}",
        ":1",
    ),
    (
        "data.root: oc.env\nrun: ${${data.root}:SECRET}",
        f"cannot read the value of run: ${{${{data.root}}:SECRET}}: {ONLY}",
        ":2",
    ),
    (
        "data.root: $\nrun: ${data.root}{oc.env:SECRET}",
        f"cannot resolve a value: ${{oc.env:SECRET}}: {ONLY}",
        ":2",
    ),
    (
        "data.root: $\nrun: ${data.root}{seed}",
        "cannot resolve a value: ${seed} is itself built from references",
        ":2",
    ),
    (
        "seed: ${epochs}\nepochs: ${seed}",
        "cannot resolve a value: ${epochs} refers to itself",
        ":1",
    ),
    ("run: ${data}", "cannot resolve a value: no such key: data", ":1"),
    (
        "run: ${recipe.chain}",
        "cannot resolve a value: ${recipe.chain} is a list or a section: a reference takes a "
        "single value",
        ":1",
    ),
    (refers("x", "@@"), "cannot resolve a value: a text of 8192 characters, at most 4096", ":15"),
    (
        refers("''", "@@") + "  l99: ${model.l30}\nepochs: 0",
        "epochs is 0",
        ":34",
    ),  # 2 to the 30 nothings
    (
        "model:\n" + "".join(f"  l{n}: ${{model.l{n + 1}}}\n" for n in range(50)),
        "cannot resolve a value: more than 32 references",
        ":2",
    ),
    (
        laughs("[@, @, @, @, @, @, @, @, @]", 12),
        "not YAML: an alias is not read: write the value again, or ${key}",
        ":3",
    ),
    (
        laughs("{a: @, b: @}", 31),
        "not YAML: an alias is not read: write the value again, or ${key}",
        ":3",
    ),
    (
        laughs("{<<: [@, @, @, @, @]}", 12),
        "not YAML: an alias is not read: write the value again, or ${key}",
        ":3",
    ),
    (
        laughs("{a: @}", 40),
        "not YAML: an alias is not read: write the value again, or ${key}",
        ":3",
    ),
    ("run: " + "[" * 5000, "cannot read the configuration: more than 32 levels deep", ""),
    ("- " * 2000, "cannot read the configuration: more than 32 levels deep", ""),
    (
        "".join(f"model.a{n}: 1\n" for n in range(501)),
        "cannot read the configuration: more than 500 keys",
        "",
    ),
    ("seed: 3\n" + " " * 2**16, "cannot read the configuration: more than 65536 bytes: '", ""),
    ("model.a: !!int ''", "cannot read the value of model.a:  is not of its type !!int", ":1"),
    ("model.a: !!int [1]", "is not of its type !!int", ":1"),
    ("model.a: !!bool x", "cannot read the value of model.a: x is not of its type !!bool", ":1"),
    (
        "model.a: !!timestamp x",
        "cannot read the value of model.a: !!timestamp is not a text, number, truth value, list "
        "or mapping",
        ":1",
    ),
    (
        "model.a: !!python/object/apply:pathlib.WindowsPath [a]",
        "!!python/object/apply:pathlib.WindowsPath is not a text",
        ":1",
    ),
    (
        "model.a: !!python/object/apply:pathlib.PosixPath [/]",
        "!!python/object/apply:pathlib.PosixPath is not a text",
        ":1",
    ),
    (
        "model.a: !!binary aGk=",
        "cannot read the value of model.a: !!binary is not a text, number, truth value, list or "
        "mapping",
        ":1",
    ),
    ("epochs: {}", "wrong value for epochs: {}", ":1"),
    (
        "model.a: [{1: 2}]",
        "cannot read the value of model.a: a key is a text of at most 200 characters, not 1",
        ":1",
    ),
    (
        "model.a: 0x" + "f" * 17,
        "cannot read the value of model.a: a whole number of more than 64 bits",
        ":1",
    ),
    (
        "optim.base_lr: " + "9" * 400,
        "cannot read the value of optim.base_lr: a whole number of more than 64 bits",
        ":1",
    ),
    (
        "run: 0x" + "f" * 9999,
        "cannot read the value of run: a text of 10001 characters, at most 4096",
        ":1",
    ),
    ("epochs: ???", "wrong value for epochs: '???'", ":1"),
    (
        'run: "a\\0b"',
        "cannot read the value of run: control characters, or bytes that are not UTF-8, in a\\x00b",
        ":1",
    ),
    (
        'run: "\\ud800"',
        "cannot read the value of run: control characters, or bytes that are not UTF-8, in \\ud800",
        ":1",
    ),
    ("epochs: [" + "1.5, " * 3000 + "]", "1.5, 1.5,... (15000 characters)", ":1"),
    ("x" * 201 + ": 1", "not YAML: a key is a text of at most 200 characters, not xxx", ":1"),
    ("? [a]\n: 1", "not YAML: a key is a text of at most 200 characters, not [Sca", ":1"),
    ("? &a [*a]\n: 1", "not YAML: an alias is not read: write the value again, or ${key}", ":1"),
    ("resume: [1]", "wrong value for resume: [1]", ":1"),
    (
        "resume: ~nobodyhere/x",
        "cannot find the folder ~nobodyhere/x: Could not determine home directory.",
        "",
    ),
    (
        "data.root: ~nobodyhere/x",
        "cannot find the folder ~nobodyhere/x: Could not determine home directory.",
        ":1",
    ),
    (
        "model.name: os:system\nmodel.command: touch hacked",
        "os:system is part of Python itself, not a model",
        ":1",
    ),
    ("data.name: ../errors", "unknown name: ../errors", ":1"),
]


@pytest.mark.parametrize(("text", "what", "line"), CONFIGURATIONS, ids=lambda value: value[:30])
def test_a_hostile_configuration(tmp_path: Path, text: str, what: str, line: str) -> None:
    (tmp_path / "x.yaml").write_text(text)
    with pytest.raises(UserError) as caught:
        plugins.check_names(configure(str(tmp_path / "x.yaml"), []))
    assert what in caught.value.what and len(str(caught.value)) < 1200
    assert caught.value.where.endswith(f"x.yaml{line}" if line else ("x.yaml", "resume"))


def test_a_reference_takes_over_one_value_of_another_key(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text(
        "batch: {size: 32, evaluate: '${batch.size}'}\nrun: r-${batch.size}-${data.name}"
    )
    config = configure(str(tmp_path / "x.yaml"), ["batch.size=16", "optim.base_lr=${recipe.gamma}"])
    assert (config.batch.evaluate, config.run, config.optim.base_lr) == (16, "r-16-digits", 0.1)


@pytest.mark.parametrize(
    ("word", "what"),
    [
        (
            "run=${oc.env:SECRET}",
            f"cannot read the value of 'run=${{oc.env:SECRET}}': ${{oc.env:SECRET}}: {ONLY}",
        ),
        (
            "run=\udcff",
            "cannot read the value of 'run=\\udcff': control characters, or bytes that are not "
            "UTF-8, in \\udcff",
        ),
        (
            "\udcff=1",
            "cannot read the value of '\\udcff=1': a key is a text of at most 200 characters, not "
            "\\udcff",
        ),
        ("model.widths=" + "[" * 5000, "(5013 characters)': more than 32 levels deep"),
        ("model.a={b.c: 1}", "the key 'b.c' within a value: write it in full, as in model.a.b=1"),
        ("x" * 5000, "(5000 characters)'"),
        ("model.a=" + "x" * 70000, "a text of 70000 characters, at most 4096"),
    ],
    ids=lambda value: ascii(value)[:30],
)
def test_a_hostile_argument(word: str, what: str) -> None:
    with pytest.raises(UserError) as caught:
        configure(None, [word])
    assert what in caught.value.what and len(str(caught.value)) < 1200


def test_an_empty_option_is_kept(tmp_path: Path) -> None:
    config = configure(None, ["model.a={}", "model.b={c: []}"])
    (tmp_path / "x.yaml").write_text(to_yaml(config))
    assert configure(str(tmp_path / "x.yaml"), []) == config and config.model.options == {
        "a": {},
        "b": {"c": []},
    }


def test_a_pipe_or_device_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.yaml")
    for path, words in (
        (str(tmp_path / "config.yaml"), []),
        ("/dev/zero", []),
        (None, [f"resume={tmp_path}"]),
    ):
        with pytest.raises(
            UserError,
            match="cannot read the configuration: not a regular file: '|config.yaml is a pipe, "
            "not a file\n",
        ):
            configure(path, words)


def test_names_of_parts_of_python_are_refused() -> None:
    for name, what in (
        ("test_fuzz:system", "test_fuzz:system is posix.system, part of Python itself"),
        ("test_fuzz:Bare", "test_fuzz:Bare has no signature that Python can read"),
        ("a" + ".b" * 2000, "(4001 characters) names no class"),
    ):
        with pytest.raises(UserError, match=re.escape(what)):
            plugins.load_dotted(name, "model.name")


if __name__ == "__main__":  # the child process of test_the_fuzzer_reports
    order = json.loads(sys.argv[1])
    fuzzing.child(
        order,
        {name: lambda rng, home, name=name: faults(rng, home)[name] for name in order["tallies"]},
    )
