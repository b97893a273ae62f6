"""A trace of the requests of this rank, in Chrome's format: how long each waits for other ranks,
and how long its collective takes."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

from hvdtrain.horovod.engine.fusion import Batch
from hvdtrain.horovod.engine.requests import Request

RANK = "{rank}"  # in a path: each rank writes a separate file; otherwise only rank 0 writes


class Timeline:
    """Several threads may call it. A row of the trace for each name; its process is the rank.
    Times: of the host's clock, microseconds."""

    def __init__(self) -> None:
        self.is_on = False
        self._file: IO[str] | None = None
        self._lock = threading.Lock()

    def start(self, path: Path, rank: int, *, marks_rounds: bool) -> None:
        """Starts a trace in a new file; a trace that is being written ends."""
        self.stop()
        self._file = path.open("w")
        self._rank = rank
        self._marks_rounds = marks_rounds
        self._rows: dict[str, int] = {}  # name -> number of its row
        self._asked: dict[int, int] = {}  # id of a request -> when it was made
        self._separator = "["
        self._write({"name": "process_name", "ph": "M", "args": {"name": f"rank {rank}"}})
        self.is_on = True

    def stop(self) -> None:
        """Ends the trace; does nothing if there is none."""
        with self._lock:
            self.is_on = False
            file = self._file
            self._file = None
        if file is not None:
            file.write("\n]\n")
            file.close()

    def asked(self, request: Request) -> None:
        self._asked[id(request)] = now_us()

    def negotiated(self, requests: Sequence[Request]) -> None:
        """Records that every rank has made these requests; they run next, or are rejected."""
        now = now_us()
        for request in requests:
            begun = self._asked.pop(id(request), None)
            if begun is not None:  # not one of a rank that has joined, nor from before start()
                self._range(f"NEGOTIATE_{request.signature.kind.upper()}", request, begun, now)

    def round_ends(self) -> None:
        """Writes the trace to the file before the calls of the round return, so that a killed job
        does not lose it."""
        with self._lock:
            if self._file is not None:
                self._file.flush()

    def round_begins(self) -> None:
        if self._marks_rounds:
            self._write({"name": "CYCLE_START", "ph": "i", "s": "p", "ts": now_us()})

    def timed(
        self, batch: Batch, start: Callable[[], Callable[[], None]], *, is_done_at_once: bool
    ) -> Callable[[], None]:
        """Returns the result of start(). is_done_at_once: the collective is complete when start()
        returns, not when the returned function has been called."""
        begun = now_us()
        wait = start()
        if is_done_at_once:
            self._made(batch, begun)
            return wait

        def finish() -> None:
            wait()
            self._made(batch, begun)

        return finish

    def came_inline(self, requests: Sequence[Request], begun: int) -> None:
        """Records requests whose tensors were sent with the negotiation. begun: now_us() at its
        beginning."""
        now = now_us()
        for request in requests:
            self._range(
                request.signature.kind.upper(),
                request,
                begun,
                now,
                tensors_in_collective=len(requests),
            )

    def _made(self, batch: Batch, begun: int) -> None:
        now = now_us()
        tensors = len(batch.units)
        for request in {id(unit.request): unit.request for unit in batch.units}.values():
            self._range(
                request.signature.kind.upper(), request, begun, now, tensors_in_collective=tensors
            )

    def _range(self, what: str, request: Request, begun: int, end: int, **more: int) -> None:
        signature = request.signature
        args = {
            "dtype": ", ".join(signature.dtypes),
            "shape": ", ".join(map(str, map(list, signature.shapes))),
            "op": signature.op,
            **more,
        }
        self._write(
            {
                "name": what,
                "ph": "X",
                "ts": begun,
                "dur": end - begun,
                "tid": self._row(signature.name),
                "args": args,
            }
        )

    def _row(self, name: str) -> int:
        row = self._rows.get(name)
        if row is None:
            row = self._rows[name] = len(self._rows) + 1
            self._write({"name": "thread_name", "ph": "M", "tid": row, "args": {"name": name}})
        return row

    def _write(self, event: dict[str, Any]) -> None:
        with self._lock:
            if self._file is None:
                return
            self._file.write(f"{self._separator}\n{json.dumps({'pid': self._rank, **event})}")
            self._separator = ","


def now_us() -> int:
    return time.time_ns() // 1000
