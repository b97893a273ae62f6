"""The pending requests of a rank, in program order, and which of them other ranks may see."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from hvdtrain.horovod.engine.errors import BadCall
from hvdtrain.horovod.engine.requests import Key, Request
from hvdtrain.horovod.engine.timeline import Timeline


class RequestQueue:
    """Requests in buckets; the bucket that is being filled is not visible to other ranks.

    Thread-safe.
    """

    def __init__(self, enough_bytes: int, timeline: Timeline) -> None:
        """enough_bytes: a bucket with this many bytes is complete."""
        self._enough_bytes = enough_bytes
        self._timeline = timeline
        self._requests: dict[Key, Request] = {}  # in the order of the program
        self._lock = threading.Lock()
        self._bucket = 0
        self._bucket_bytes = 0
        self._bucket_is_empty = True

    def add(self, request: Request) -> bool:
        """Adds a request. Returns True if enough requests are in the bucket. Raises BadCall if a
        request of this name is pending."""
        with self._lock:
            if request.key in self._requests:
                what = (
                    "Requested to allreduce, allgather, or broadcast a tensor with the same name "
                    "as another tensor that is currently "
                    "being processed."
                )
                raise BadCall(
                    what,
                    request.signature.where,
                    "another name, or synchronize() the first one first",
                )
            request.bucket = self._bucket
            self._requests[request.key] = request
            self._bucket_bytes += request.size_bytes
            self._bucket_is_empty = False
            if self._timeline.is_on:
                self._timeline.asked(request)
            return self._bucket_bytes >= self._enough_bytes

    def show(self) -> None:
        """Makes the requests so far visible to the other ranks from the next round on."""
        with self._lock:
            if not self._bucket_is_empty:
                self._bucket = self._bucket + 1
                self._bucket_bytes = 0
                self._bucket_is_empty = True

    def shown(self) -> list[Request]:
        with self._lock:
            return [request for request in self._requests.values() if request.bucket < self._bucket]

    def has_shown(self) -> bool:
        with self._lock:  # another thread may take requests out meanwhile
            return any(request.bucket < self._bucket for request in self._requests.values())

    def remove(self, requests: Sequence[Request]) -> None:
        with self._lock:
            for request in requests:
                if self._requests.get(request.key) is request:
                    del self._requests[request.key]

    def fail_all(self, error: BaseException) -> None:
        with self._lock:
            for request in self._requests.values():
                request.fail(error)
            self._requests.clear()
