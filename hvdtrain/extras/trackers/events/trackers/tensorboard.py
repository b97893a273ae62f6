"""TensorBoard: the numbers of each event, and the configuration and the header as text, in
RUN/tensorboard/NAME, with the name of the run."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdtrain.config.schema import Config
from hvdtrain.core.folder import Folder
from hvdtrain.events.log import Event
from hvdtrain.events.redaction import redact_urls
from hvdtrain.extras.trackers.tracker_data import (
    METRICS,
    flat_config,
    metric_names,
    require_package,
    scalars,
)

if TYPE_CHECKING:
    from tensorboard.summary.writer.record_writer import RecordWriter

# The tags that come first: TensorBoard sorts groups by their names, capital letters before small
# ones.
_CURVES = {
    "train/loss": "Loss/train",
    "val/loss": "Loss/val",
    "train/accuracy": "Accuracy/train",
    "val/accuracy": "Accuracy/val",
}


def check_installed() -> None:
    """Raises UserError if tensorboard is not installed; imports nothing."""
    require_package("tensorboard", "tensorboard")


def build(config: Config, run: Path) -> TensorBoard:
    """Builds the tracker. Show RUN with tensorboard --logdir RUN/tensorboard, which lists the run
    under its own name.

    Raises UserError if tensorboard is not installed; it is imported at the first event.
    """
    check_installed()
    return TensorBoard(config, run)


class TensorBoard:
    """One file for each start of the job. Each event is in the file when the call returns."""

    def __init__(self, config: Config, run: Path) -> None:
        self._metrics = METRICS
        self._config = config
        self._run = run
        self._records: RecordWriter | None = None
        self._start: Event | None = None  # a start event whose texts are not written yet

    def __call__(self, event: Event) -> None:
        self._metrics = metric_names(event, self._metrics)
        numbers = scalars(event, self._metrics)
        if self._records is None:
            self._records = self._open()
            self._write(event.time, 0, file_version="brain.Event:2")
        if event.kind == "start":
            self._write_restart(event)
            self._start = event
        if numbers:
            values = [
                {"tag": _CURVES.get(tag, tag), "simple_value": x} for tag, x in numbers.items()
            ]
            self._write(event.time, event.step, summary={"value": values})
            self._write_texts()
        self._records.flush()

    def close(self) -> None:
        if self._records is not None:
            self._write_texts()
            self._records.close()

    def _open(self) -> RecordWriter:
        # This import takes 0.2 s, torch.utils.tensorboard 2 s. EventFileWriter also imports
        # TensorFlow if it is installed.
        from tensorboard.summary.writer.record_writer import RecordWriter

        # Readers take the files of a folder in the order of their names: the time comes first, in
        # microseconds for quick restarts.
        name = f"events.out.tfevents.{time.time():017.6f}.{socket.gethostname()}.{os.getpid()}"
        with Folder.make(self._run, "tensorboard", self._run.absolute().name) as folder:
            return RecordWriter(folder.create(name))

    def _write_restart(self, event: Event) -> None:
        """Writes a restart. A resumed job repeats steps that an earlier start did after this step;
        readers then drop the earlier ones."""
        from tensorboard.compat.proto.event_pb2 import SessionLog

        self._write(event.time, event.step + 1, session_log=SessionLog(status=SessionLog.START))

    def _write_texts(self) -> None:
        """Writes the configuration and the header after the first numbers: a page opened before
        them would begin with the texts."""
        event = self._start
        self._start = None
        if event is None:
            return
        rows = "".join(
            f"| {key} | `{value.replace('|', '&#124;')}` |\n"
            for key, value in flat_config(self._config).items()
        )
        texts = {"config": f"| key | value |\n| --- | --- |\n{rows}"}
        if event.fields.get("lines"):
            # indented, so that Markdown shows it verbatim
            lines = [f"    {redact_urls(line)}" for line in event.fields["lines"]]
            texts["header"] = "\n".join(lines)
        self._write(
            event.time,
            event.step,
            summary={"value": [_text(tag, text) for tag, text in texts.items()]},
        )

    def _write(self, time_s: float, step: int, **content: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event as Record

        assert self._records is not None
        self._records.write(Record(wall_time=time_s, step=step, **content).SerializeToString())


def _text(tag: str, text: str) -> dict[str, Any]:
    """Returns a summary value that the TEXT tab shows."""
    from tensorboard.compat.proto.types_pb2 import DT_STRING

    shape = {"dim": [{"size": 1}]}
    return {
        "tag": f"{tag}/text_summary",
        "metadata": {"plugin_data": {"plugin_name": "text"}},
        "tensor": {"dtype": DT_STRING, "string_val": [text.encode()], "tensor_shape": shape},
    }
