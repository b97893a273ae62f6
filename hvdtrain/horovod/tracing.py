"""start_timeline() and stop_timeline(): what becomes of each call, as a trace for Perfetto or chrome://tracing."""

from __future__ import annotations

from hvdtrain.horovod.job import JOB


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Begins a trace in a new file, on rank 0; with "{rank}" in the path every rank that calls it writes its own.

    Each name has a row: NEGOTIATE_ALLREDUCE from the call until every rank has made it, ALLREDUCE while the collective is made, with dtype,
    shape, and how many tensors share the collective. mark_cycles: marks the beginning of each round of agreement. HOROVOD_TIMELINE=PATH
    begins one in init().
    """
    JOB.engine.start_timeline(str(file_path), mark_cycles=mark_cycles)


def stop_timeline() -> None:
    """Ends the trace; the file is complete."""
    JOB.engine.stop_timeline()
