"""What a pipeline measures: how long its ranks wait, and passes on one clock."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from hvdtrain.config.read import configure
from hvdtrain.events.log import Log
from hvdtrain.extras.divided.gauge import MeshGauge
from hvdtrain.extras.pipeline.gauge import PipelineGauge, on_one_clock
from hvdtrain.frameworks.learner import TimedPass, Waited


def test_the_gauge_of_a_pipeline_says_how_long_its_ranks_wait() -> None:
    learner: Any = SimpleNamespace(
        read_waited=lambda: Waited(4.0, 2.0, 0.2), waits_only_in_communication=True
    )
    two: Any = SimpleNamespace(rank=0, size=2)
    one_each = PipelineGauge(configure(None, ["parallel.pipeline=2"]), two, learner, Log([]))
    of_mesh = MeshGauge(2, learner)
    assert one_each.values({"communication": 0.5}) == {"rank.passes": 4.0, "rank.waiting": 2.0}
    assert of_mesh.values({"communication": 0.5}) == {"rank.communication": 0.5}
    sums = {
        "rank.passes": np.array([4.0, 4.0]),
        "rank.waiting": np.array([2.0, 1.0]),
        "rank.work": np.array([2.0, 3.0]),
    }
    sums["rank.communication"] = np.array([0.5, 0.1])
    assert of_mesh.fields(sums, 100) == {}
    assert one_each.fields(sums, 100) == {"bubble": [0.5, 0.25], "bubble_predicted": 0.2}
    assert one_each.lines() == [
        "pipeline 38% of the time of its passes idle, 25% to 50% of a rank; 20% by its schedule "
        "with equal stages",
        "         stage 1 is slowest: 30 ms of own work a step, stage 0 20; stage 0 waits most: "
        "50%",
    ]
    for waiting, communication in (([20.0, 10.0], [5.0, 1.0]), ([0.0, 0.0], [0.0, 0.0])):
        of_ranks = one_each.epoch_fields(100) | of_mesh.epoch_fields(100)
        assert (
            of_ranks["rank_waiting_ms"].tolist() == waiting
            and of_ranks["rank_communication_ms"].tolist() == communication
        )


def test_passes_of_two_hosts_are_put_on_one_clock() -> None:
    """Stage 0: forward 0 to 1 s, backward 3 to 4; stage 1 between: what arrives before it was sent
    tells that its clock is behind."""
    first = [TimedPass("forward", 0, 0, 0.0, 1.0, 0.0), TimedPass("backward", 0, 0, 1.0, 4.0, 2.0)]
    second = [TimedPass("forward", 1, 0, 0.0, 2.0, 1.0), TimedPass("backward", 1, 0, 2.0, 3.0, 0.0)]
    assert on_one_clock([first, second]) == [first, second]
    behind = [
        one._replace(start_s=one.start_s - 100.0, stop_s=one.stop_s - 100.0) for one in second
    ]
    third = [
        one._replace(stage=2, start_s=one.start_s + 7.0, stop_s=one.stop_s + 7.0) for one in second
    ]
    assert on_one_clock([first, behind]) == [first, second]
    assert on_one_clock([first, behind, third])[1] == second
