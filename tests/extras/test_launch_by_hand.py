"""Ranks that are started by hand on each node, by --num-nodes, --node-id and --num-gpus."""

from __future__ import annotations

import pytest
from ranks import needs_extra, python

from hvdtrain import errors
from hvdtrain.errors import UserError
from hvdtrain.extras.launch.by_hand import NodeOptions, parse_node_options


def test_node_options(monkeypatch: pytest.MonkeyPatch) -> None:
    options, job = parse_node_options(
        ["--num-nodes", "2", "epochs=3", "--node-id=1", "--num-gpus", "2", "--config", "c.yaml"]
    )
    assert (options, job) == (NodeOptions(2, 1, 2), ["epochs=3", "--config", "c.yaml"])
    first, second = options.environments("n1:29500")
    assert first == {
        "RANK": "2",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "ROLE_RANK": "2",
        "ROLE_WORLD_SIZE": "4",
        "ROLE_NAME": "default",
        "MASTER_ADDR": "n1",
        "MASTER_PORT": "29500",
    }
    assert (second["RANK"], second["LOCAL_RANK"]) == ("3", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,3")
    assert parse_node_options([])[0].processes == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert parse_node_options([])[0].processes == 1
    for wrong in (
        ["--num-nodes", "x"],
        ["--num-gpus"],
        ["--num-nodes", "2", "--node-id", "2"],
        ["--num-gpus=0"],
    ):
        with pytest.raises(UserError):
            parse_node_options(wrong)


def test_two_nodes_need_an_address() -> None:
    result = python(["-m", "hvdtrain", "--num-nodes", "2", "--node-id", "0", "--num-gpus", "1"])
    assert result.returncode == errors.USER
    assert (
        "2 nodes need the address of rank 0" in result.stderr
        and "comm.address=n1:29500" in result.stderr
    )


@needs_extra("check")
def test_other_commands_run_on_ranks_without_a_launcher_too() -> None:
    result = python(["-m", "hvdtrain", "check", "--num-gpus=2", "data.name=digits"])
    assert result.returncode == errors.DONE, result
    assert (
        "hvdtrain check: 2 ranks\n" in result.stdout and "engine    torchdist" in result.stdout
    ), result
    result = python(["-m", "hvdtrain", "chek", "--num-gpus=2"])
    assert result.returncode == errors.USER and "did you mean check?" in result.stderr, result
