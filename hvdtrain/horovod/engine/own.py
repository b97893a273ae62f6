"""hvdtrain's engine: a lane for each process set, over a communicator."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, cast

import torch

from hvdtrain.comm.communicator import Communicator, elastic
from hvdtrain.comm.mesh import split_groups
from hvdtrain.comm.order import Alone, OrderedExchange
from hvdtrain.errors import UserError
from hvdtrain.horovod.engine.errors import BadCall, HorovodInternalError
from hvdtrain.horovod.engine.lane import Lane
from hvdtrain.horovod.engine.requests import GLOBAL, Request, Signature
from hvdtrain.horovod.engine.settings import Settings
from hvdtrain.horovod.engine.timeline import RANK, Timeline
from hvdtrain.horovod.engine.waiting import Callers


class OwnEngine:
    """The engine with a lane for each process set. Several threads may call it. With several
    process sets, each runs its rounds on a separate thread while another waits."""

    def __init__(self, communicator: Communicator, settings: Settings) -> None:
        """A collective."""
        self.name = communicator.name
        self._communicator = communicator
        self._settings = settings
        self._numbers = itertools.count(1)
        self._waiting = 0
        self._lock = threading.Lock()
        self._is_asynchronous = "asynchronous" in communicator.features
        self._can_shrink = False
        self._timeline = Timeline()
        self._callers = Callers()
        self._begin()
        if settings.timeline is not None:
            self.start_timeline(settings.timeline, mark_cycles=settings.marks_cycles)

    def _begin(self) -> None:
        """Starts with the communicator's ranks and only the global process set."""
        communicator = self._communicator
        self.rank = communicator.rank
        self.size = communicator.size
        self.local_rank = communicator.local_rank
        self.local_size = communicator.local_size
        places = communicator.allgather_object((communicator.local_rank, communicator.local_size))
        hosts = split_groups(communicator, 0).hosts if self.size > 1 else [0]
        beside = sorted(
            {
                hosts[rank]
                for rank, (local_rank, _) in enumerate(places)
                if local_rank == self.local_rank
            }
        )
        self.cross_rank = beside.index(hosts[self.rank])
        self.cross_size = len(beside)
        self.is_homogeneous = len({local_size for _, local_size in places}) == 1
        self._sets: dict[int, list[int]] = {GLOBAL: list(range(self.size))}
        self._lanes = {GLOBAL: self._lane(communicator, self._sets[GLOBAL])}
        self._handles: dict[int, tuple[Lane, Request]] = {}
        self._last_id = GLOBAL

    @property
    def secret(self) -> str | None:
        """The job's secret; a new one after the loss of a rank."""
        return self._communicator.secret if self.size > 1 else None

    def submit(self, set_id: int, request: Request) -> int:
        lane = self._lanes.get(set_id)
        if lane is None:
            ranks = self.ranks_of(set_id)
            what = f"rank {self.rank} is not a member of the process set of ranks {ranks}"
            raise BadCall(
                what,
                request.signature.where,
                "call it only on these ranks: process_set.included()",
            )
        self._callers.ask()
        if lane.submit(request) and (self._is_asynchronous or len(self._lanes) > 1):
            lane.show()
            lane.start()
        handle = next(self._numbers)
        self._handles[handle] = lane, request
        return handle

    def poll(self, handle: int) -> bool:
        lane, request = self._handles[handle]
        self._show()
        for other in list(
            self._lanes.values()
        ):  # another rank may wait for this rank's requests in that set
            if other is not lane and other.has_shown():
                other.start()
        if is_done := lane.step(request):
            return is_done
        self._callers.poll(lane)
        return False

    def wait(self, handle: int) -> Any:
        lane, request = self._handles.pop(handle)
        if not request.done:
            if len(self._lanes) == 1:
                lane.show()
                lane.finish(request)
            else:
                with self._others_going_on(lane):
                    lane.finish(request)
        if request.error is not None:
            raise request.error
        return lane.result(request)

    def join(self) -> int:
        with self._others_going_on(self._lanes[GLOBAL]):
            return self._lanes[GLOBAL].join()

    def add_set(self, ranks: Sequence[int]) -> int:
        if not self._has_threads:
            what = "MPI was started without MPI_THREAD_MULTIPLE, which concurrent process sets need"
            raise BadCall(
                what,
                "hvd.add_process_set()",
                "hvd.init() before mpi4py.MPI is imported; or HVDTRAIN_ENGINE=torchdist",
            )
        number = self._agree_on("add_process_set", ranks)
        if isinstance(number, int):
            return number
        raise BadCall(
            f"a process set of ranks {list(ranks)} already exists",
            "hvd.add_process_set()",
            "use that one",
        )

    def remove_set(self, set_id: int) -> bool:
        if set_id == GLOBAL or set_id not in self._sets:
            return False
        lane = self._lanes.get(set_id)
        self._agree_on("remove_process_set", self._sets[set_id])
        if lane is not None:
            lane.leave()
            self._free(lane)
        return True

    def _free(self, lane: Lane) -> None:
        """Frees a process set that all its ranks have left. A collective of these ranks."""
        lane.close()
        if lane.communicator is not self._communicator:  # the single engine returns itself
            cast(Any, self._communicator).free_group(lane.communicator)

    def ranks_of(self, set_id: int) -> list[int]:
        if set_id not in self._sets:
            raise BadCall(
                "this process set was not added, or was removed",
                f"process set {set_id}",
                "hvd.add_process_set()",
            )
        return self._sets[set_id]

    def be_ready_to_shrink(self) -> None:
        if self._can_shrink or "shrink" not in self._communicator.features or self.size == 1:
            return
        try:
            elastic(self._communicator, "hvd.elastic.run()").be_ready_to_shrink(gpu=True)
        except UserError:  # on every rank, so that a loss ends the job, as without elastic.run()
            return
        self._can_shrink = True
        for lane in self._lanes.values():
            lane.rounds.names_lost = False

    def confirm(self) -> None:
        if self._can_shrink:
            try:
                elastic(self._communicator, "hvd.elastic.run()").confirm()
            except Exception as error:
                raise HorovodInternalError("a rank is lost") from error

    def recover(self, error: BaseException) -> None:
        communicator = (
            elastic(self._communicator, "hvd.elastic.run()") if self._can_shrink else None
        )
        cause = error.__cause__ or error
        if communicator is None or not communicator.is_loss(cause):
            raise error
        while True:
            try:
                communicator.shrink()
                self._begin()
                return
            except Exception as again:  # another rank is lost meanwhile
                if not communicator.is_loss(again):
                    raise

    def start_timeline(self, path: str, *, mark_cycles: bool) -> None:
        if self.rank == 0 or RANK in path:
            self._timeline.start(
                Path(path.replace(RANK, str(self.rank))), self.rank, marks_rounds=mark_cycles
            )

    def stop_timeline(self) -> None:
        self._timeline.stop()

    def leave(self) -> None:
        self._show()
        others = [lane for set_id, lane in self._lanes.items() if set_id != GLOBAL]
        failed: list[BaseException] = []

        def leave_set(lane: Lane) -> None:
            try:
                lane.leave()
            except BaseException as error:
                failed.append(error)

        leaving = [threading.Thread(target=leave_set, args=(lane,), daemon=True) for lane in others]
        for thread in leaving:
            thread.start()
        self._lanes[GLOBAL].leave()
        for thread in leaving:
            thread.join()
        self._timeline.stop()
        if failed:
            raise failed[0]
        for lane in others:
            if lane.has_left:
                self._free(lane)
        self._handles.clear()
        self._sets = {GLOBAL: self._sets[GLOBAL]}
        self._lanes = {GLOBAL: self._lanes[GLOBAL]}
        self._last_id = GLOBAL

    def abort(self, code: int) -> NoReturn:
        self._communicator.abort(code)

    def _lane(self, communicator: Communicator, ranks: Sequence[int]) -> Lane:
        exchange: OrderedExchange = (
            cast(Any, communicator).exchange() if communicator.size > 1 else Alone()
        )
        self._has_threads = exchange.threads
        lane = Lane(
            communicator,
            exchange,
            ranks,
            self._settings,
            self._timeline,
            self._callers,
            self._change,
        )
        # otherwise the survivors continue immediately
        lane.rounds.names_lost = not self._can_shrink
        return lane

    def _agree_on(self, kind: str, ranks: Sequence[int]) -> Any:
        signature = Signature(f"{kind} {list(ranks)}", kind, ranks=tuple(ranks))
        return self.wait(self.submit(GLOBAL, Request(signature, list[torch.Tensor]())))

    def _change(self, signature: Signature) -> int | None:
        """Adds or removes a set, at the same position in the requests of all ranks; returns its id,
        None if it already existed."""
        ranks = list(signature.ranks)
        known = next((set_id for set_id, members in self._sets.items() if members == ranks), None)
        if signature.kind == "remove_process_set":
            if known is not None:
                del self._sets[known]
                self._lanes.pop(known, None)
            return known
        if known is not None:
            return None
        self._last_id = set_id = self._last_id + 1
        group = self._communicator.split(0 if self.rank in ranks else None)
        self._sets[set_id] = ranks
        if group is not None:
            self._lanes[set_id] = self._lane(group, ranks)
        return set_id

    def _show(self) -> None:
        for lane in list(self._lanes.values()):
            lane.show()

    @contextmanager
    def _others_going_on(self, lane: Lane) -> Iterator[None]:
        """While this thread waits, its requests to other process sets also run, because other ranks
        may wait for them first."""
        self._show()
        others = [other for other in list(self._lanes.values()) if other is not lane]
        with self._lock:
            self._waiting += 1
        for other in others:
            other.want(True)
            if other.has_shown():
                other.start()
        try:
            yield
        finally:
            with self._lock:
                self._waiting -= 1
                if not self._waiting:
                    for other in list(self._lanes.values()):
                        other.want(False)
