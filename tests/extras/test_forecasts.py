"""data.shift: samples with targets some steps later, also of files with missing times."""

from __future__ import annotations

import numpy as np
import pytest

from hvdtrain.data.declared import CheckedSource
from hvdtrain.data.option_error import OptionError
from hvdtrain.data.source import NamedArrays
from hvdtrain.data.subset import subset
from hvdtrain.extras.forecasts.shifted import SampleTimes, shifted


def test_shifted_arrays_take_y_of_the_later_sample() -> None:
    x = np.arange(10.0)[:, None]
    found = shifted(NamedArrays({"x": x, "y": x + 100, "z": x}, gaps=frozenset({"y"})), 4)
    batch = found.read(np.arange(6))
    assert batch["y"].ravel().tolist() == [104.0, 105.0, 106.0, 107.0, 108.0, 109.0]
    assert batch["x"].ravel().tolist() == batch["z"].ravel().tolist() == [0, 1, 2, 3, 4, 5]
    assert found.fields["y"].gaps and not found.fields["x"].gaps
    with pytest.raises(OptionError, match="needs more than 10 samples"):
        shifted(NamedArrays({"x": x}), 10)


def test_samples_whose_targets_are_at_another_time_are_left_out() -> None:
    """Days 5 to 7 are missing: day 4 has no next day, nor has any day of another set."""
    x = np.arange(9.0)[:, None]
    data = CheckedSource(NamedArrays({"x": x}), "days")
    times = SampleTimes(np.array([0.0, 1, 2, 3, 4, 8, 9, 10, 11]), "days")
    found = shifted(data, 1, times)
    batch = found.read(np.arange(len(found)))
    assert batch["x"].ravel().tolist() == [0, 1, 2, 3, 5, 6, 7]
    assert batch["y"].ravel().tolist() == [1, 2, 3, 4, 6, 7, 8]
    assert found.notes[-1] == (
        "data.shift=1: 1 of 8 samples are left out, as their targets are not 1 days later"
    )
    part = shifted(subset(data, np.array([3, 4, 5, 6])), 1, times)
    assert part.read(np.arange(len(part)))["x"].ravel().tolist() == [3, 5]
    assert len(shifted(data, 1)) == 8 and not shifted(data, 1).notes
    assert len(shifted(data, 2, SampleTimes(np.arange(9.0), ""))) == 7
