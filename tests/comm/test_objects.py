"""Objects that ranks send each other as signed JSON: nothing that a stranger sends runs, and
nothing unsigned is taken."""

from __future__ import annotations

import hmac
import json
import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvdtrain.comm.launcher_variables import Placement
from hvdtrain.comm.signed import Forged, pack, unpack
from hvdtrain.config.read import Assignment
from hvdtrain.core.progress import Progress
from hvdtrain.errors import Diverged, UserError
from hvdtrain.training.checkpoint.files import Damaged
from hvdtrain.training.checkpoint.resume import ResumePoint
from hvdtrain.training.progress.train_state import TrainState

THINGS = [
    None,
    [1, 2.5, math.inf, True, "text\0", None, 2**70],
    ("a", (), [("b",)]),
    {"a": 1, 2: ("x",), (3, 4): {}},
    Path("/a/b"),
    Assignment("data.shape", [1, 2], "command line"),
    Placement(0, 2, 0, 1, "srun"),
    (
        ResumePoint(Path("run"), TrainState(Progress(10, 20, 3, 5), last=0.5), ["a line"], []),
        Path("run"),
    ),
]


@pytest.mark.parametrize("thing", THINGS, ids=repr)
def test_what_ranks_exchange_comes_back_equal(thing: Any) -> None:
    found = unpack(pack(thing, "s", "p"), "s", "p")
    assert repr(found) == repr(thing) and type(found) is type(thing)


def test_arrays_numbers_of_numpy_and_errors_come_back() -> None:
    array = np.arange(6, dtype=np.int16).reshape(2, 3)
    found = unpack(pack([array, np.float32(0.5)], ""), "")
    np.testing.assert_array_equal(found[0], array)
    assert found[0].dtype == array.dtype and found[0].flags.writeable and found[1] == 0.5
    for kind in (UserError, Diverged, Damaged):
        error = unpack(pack(kind("what", "where", "fix"), ""), "")
        assert type(error) is kind and (error.what, error.where, error.fix) == (
            "what",
            "where",
            "fix",
        )


class Foreign:
    pass


def test_other_objects_are_refused_where_they_are_sent() -> None:
    for thing in (Foreign(), {1}, b"", np.array([None]), Path.cwd):
        with pytest.raises(TypeError, match="ranks do not exchange "):
            pack([thing], "")


def test_bytes_of_another_secret_purpose_or_content_are_refused() -> None:
    packed = pack("yes", "secret", "abort")
    for changed, secret, purpose in (
        (packed, "other", "abort"),
        (packed, "", "abort"),
        (packed, "secret", "reply"),
        (packed[:-1] + b"!", "secret", "abort"),
        (b"", "secret", "abort"),
        (b"0", "", ""),
    ):
        with pytest.raises(Forged):
            unpack(changed, secret, purpose)


HOSTILE: list[Any] = [
    {"class": ["subprocess", "Popen", [["touch", "ran"]]]},
    {"class": ["os", "system", ["touch ran"]]},
    {"class": ["hvdtrain.core.process", "start_child", [["touch", "ran"], {"dict": []}, 15]]},
    {"class": ["hvdtrain.errors", "UserError.__init__.__globals__", []]},
    {"class": ["hvdtrain.comm.signed", "Path", ["x"]]},
    {"class": ["hvdtrain.cli.horovod", "x", []]},
    {"class": ["hvdtrain.comm.launcher_variables", "Placement", [1]]},
    {"array": ["|O", [1], "AAAAAAAAAAA="]},
    {"array": ["<f8", [10**12], ""]},
    {"unknown": 1},
    {},
    {"dict": [[[], 1]]},
]


@pytest.mark.parametrize("tree", HOSTILE, ids=repr)
def test_a_stranger_without_a_secret_runs_nothing(
    tree: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for text in (json.dumps(tree).encode(), pickle.dumps(tree), b"[" * 100000, b"\xff"):
        # where the job has no secret, anybody can sign
        signature = hmac.digest(b"", b"\0" + text, "sha256")
        with pytest.raises(Forged):
            unpack(signature + text, "")
    assert not list(tmp_path.iterdir())
