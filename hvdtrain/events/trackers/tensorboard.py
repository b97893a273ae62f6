"""TensorBoard: the numbers of each event, the configuration and the header as texts, in RUN/tensorboard."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdtrain.config.schema import Config
from hvdtrain.events.log import Event
from hvdtrain.events.redaction import without_login
from hvdtrain.events.scalars import scalars
from hvdtrain.events.trackers.settings import demand, texts

if TYPE_CHECKING:
    from tensorboard.summary.writer.record_writer import RecordWriter


def build(config: Config, run: Path) -> TensorBoard:
    """Show them with: tensorboard --logdir RUN. Nothing is imported before the first event."""
    demand("tensorboard", "tensorboard")
    return TensorBoard(config, run / "tensorboard")


class TensorBoard:
    """One file for each start of the job. Each event is in the file when the call returns."""

    def __init__(self, config: Config, folder: Path) -> None:
        self._config, self._folder = config, folder
        self._records: RecordWriter | None = None

    def __call__(self, event: Event) -> None:
        numbers = scalars(event)
        if self._records is None:
            self._records = self._open(event)
        if event.kind == "start":
            self._begin(event)
        if numbers:
            self._write(event.time, event.step, summary={"value": [{"tag": tag, "simple_value": x} for tag, x in numbers.items()]})
        self._records.flush()

    def close(self) -> None:
        if self._records is not None:
            self._records.close()

    def _open(self, event: Event) -> RecordWriter:
        # Imported in 0.2 s, where torch.utils.tensorboard takes 2; EventFileWriter would import TensorFlow too, where that is installed.
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._folder.mkdir(parents=True, exist_ok=True)
        # Readers take the files of a folder in the order of their names: so the time comes first, as finely as restarts may follow.
        name = f"events.out.tfevents.{time.time():017.6f}.{socket.gethostname()}.{os.getpid()}"
        self._records = RecordWriter((self._folder / name).open("xb"))
        self._write(event.time, 0, file_version="brain.Event:2")
        return self._records

    def _begin(self, event: Event) -> None:
        from tensorboard.compat.proto.event_pb2 import SessionLog

        # What an earlier start did beyond this step is done again: readers drop it from there on.
        self._write(event.time, event.step + 1, session_log=SessionLog(status=SessionLog.START))
        rows = "".join(f"| {key} | `{value.replace('|', '&#124;')}` |\n" for key, value in texts(self._config).items())
        shown = {"config": f"| key | value |\n| --- | --- |\n{rows}"}
        if event.fields.get("lines"):
            shown["header"] = "\n".join(
                f"    {without_login(line)}" for line in event.fields["lines"]
            )  # indented: Markdown leaves it as it is
        self._write(event.time, event.step, summary={"value": [_text(tag, text) for tag, text in shown.items()]})

    def _write(self, time_s: float, step: int, **what: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event as Record

        assert self._records is not None
        self._records.write(Record(wall_time=time_s, step=step, **what).SerializeToString())


def _text(tag: str, text: str) -> dict[str, Any]:
    """A summary value that the TEXT tab shows."""
    from tensorboard.compat.proto.types_pb2 import DT_STRING

    shape = {"dim": [{"size": 1}]}
    return {
        "tag": f"{tag}/text_summary",
        "metadata": {"plugin_data": {"plugin_name": "text"}},
        "tensor": {"dtype": DT_STRING, "string_val": [text.encode()], "tensor_shape": shape},
    }
