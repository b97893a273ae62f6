"""replay: what it says of the arrays that it compares; test_servers.py runs it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hvdtrain.errors import DIVERGED, DONE
from hvdtrain.extras.servers.replay import compare


def test_replay_says_what_it_does_not_compare(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = {
        "p.weight": np.ones(3),
        "s.weight.momentum": np.ones(3),
        "b.norm.running_mean": np.ones(2),
        "b.norm.running_var": np.ones(2),
    }
    assert compare(tmp_path, one, one | {"b.norm.running_mean": np.zeros(2)}, 7) == DONE
    out = capsys.readouterr().out
    assert (
        "not compared: 2 buffers; running statistics" in out
        and "the 2 arrays of weights and optimizer state of step 7 are" in out
    )
    assert compare(tmp_path, one, one | {"s.weight.momentum": np.zeros(3)}, 7) == DIVERGED
    assert compare(tmp_path, {"p.weight": np.ones(3)}, {"p.weight": np.ones(3)}, 7) == DONE
    assert "1 of 2 arrays" in (out := capsys.readouterr().out) and out.count("not compared") == 1
