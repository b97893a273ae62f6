"""The engine of a resumed pipeline, which every rank chooses by itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvdtrain.comm.engines import needed_features
from hvdtrain.comm.launcher_variables import Placement
from hvdtrain.config.read import read_resumed
from hvdtrain.errors import UserError
from hvdtrain.training.run_rank import _before_connecting


def test_every_rank_chooses_the_engine_by_the_keys_of_the_resumed_run(tmp_path: Path) -> None:
    """A pipeline sends from rank to rank, which Horovod does not support. Rank 0 chose mpi for a
    resumed one; the others did not read the run, chose horovod, and waited."""
    (tmp_path / "config.yaml").write_text("parallel: {pipeline: 2}\nmodel: {name: mlp}\n")
    elsewhere = [f"resume={tmp_path / 'elsewhere'}"]  # as on a host that does not see the folder
    for rank in (0, 1):
        place = Placement(rank, 2, rank, 2, "mpirun")
        config = _before_connecting(None, [f"resume={tmp_path}"], place, read_resumed, {})
        assert needed_features(config) == {"p2p"}
        assert not needed_features(_before_connecting(None, elsewhere, place, read_resumed, {}))
    alone = Placement(0, 1, 0, 1, "none")
    with pytest.raises(UserError, match="there is no run folder"):
        _before_connecting(None, elsewhere, alone, read_resumed, {})
