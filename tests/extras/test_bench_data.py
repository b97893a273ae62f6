"""bench data: it shuffles as a job does."""

from __future__ import annotations

from pathlib import Path

import pytest
import stored_data

from hvdtrain.__main__ import main
from hvdtrain.comm.communicator import SingleProcessCommunicator
from hvdtrain.config.read import configure
from hvdtrain.data.array_files import array_files_in
from hvdtrain.extras.bench import data as bench_data
from hvdtrain.extras.bench.trainer import Trainer
from hvdtrain.extras.science.stored.text_tables import lines as table_lines
from hvdtrain.training.datasets import open_datasets
from hvdtrain.training.health.signals import Signals


def test_a_bench_shuffles_the_blocks_of_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a job does: 30 rows of a CSV file are a block here, where 256 samples are one of data
    without any."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(table_lines, "_BLOCK_BYTES", 16_000)
    stored_data.write(tmp_path, "csv")
    words = [
        "data.name=csv",
        *stored_data.WORDS["csv"],
        "data.shuffle=blocks",
        "data.val_share=0.1",
        "task.name=regression",
    ]
    config = configure(
        None, [*words, "model.name=mlp", "model.widths=[7]", "batch.size=24", "speed.device=cpu"]
    )
    communicator = SingleProcessCommunicator()
    datasets = open_datasets(config, communicator)
    files = array_files_in(datasets.train)
    assert files is not None
    with Signals(0) as signals:
        trainer = Trainer(config, communicator, signals, datasets)
        found = bench_data.measure(config, communicator, signals, 2)
    assert (
        trainer.job.config.data.shuffle_block == files.rows_of_block
        and 20 < (files.rows_of_block or 0) < 50
    )
    assert found["samples_per_s"]["prefetch"][1] > 0 and found["samples"] == len(datasets.train)


def test_a_folder_is_not_taken_for_the_file_of_the_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "step", "--json", str(tmp_path)]) == 2
    assert f"{tmp_path.name} is a folder, and --json takes it for" in capsys.readouterr().err
