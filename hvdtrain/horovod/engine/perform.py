"""Runs the collectives of batches on separate streams: packs several tensors into one buffer, and
distributes the results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch

from hvdtrain.comm.communicator import Communicator, SingleProcessCommunicator, part_of
from hvdtrain.comm.staging import Accelerator, Stream, kind_of_build
from hvdtrain.horovod.engine.errors import BadCall
from hvdtrain.horovod.engine.fusion import Batch, RequestTensor, batches, runs
from hvdtrain.horovod.engine.reduce import (
    as_bytes,
    finish_reduction_,
    is_for_engine,
    reduced,
    scale_,
    scattered_sums,
    start_reduce_,
    swap,
)
from hvdtrain.horovod.engine.requests import Request
from hvdtrain.horovod.engine.timeline import Timeline

Results = dict[tuple[int, int], Any]  # (id of the request, index of the tensor) -> result


class Packed(NamedTuple):
    """Tensors one after another in a buffer that the engine takes."""

    flat: torch.Tensor
    pieces: Sequence[torch.Tensor]  # of each tensor, of `flat` or of `device`
    device: torch.Tensor | None = None  # of the same length, on the tensors' GPU

    def unpack(self, targets: Sequence[torch.Tensor]) -> None:
        """Copies the results to the targets. The host does not wait for a GPU."""
        if not len(self.flat):
            return
        if self.device is not None:
            self.device.copy_(self.flat, non_blocking=True)
        torch._foreach_copy_(list(targets), list(self.pieces), non_blocking=True)


class Performer:
    """Runs the collectives of one process set."""

    def __init__(
        self,
        communicator: Communicator,
        ranks: Sequence[int],
        fusion_bytes: int,
        timeline: Timeline,
        streams: Streams,
    ) -> None:
        """ranks: the communicator's ranks, as numbered in the job."""
        self._streams = streams
        self._communicator = communicator
        self._ranks = list(ranks)
        self._fusion_bytes = fusion_bytes
        self._timeline = timeline
        self._buffers: dict[
            tuple[torch.dtype, torch.device], torch.Tensor
        ] = {}  # reused from batch to batch
        self._start = {
            "allreduce": self._start_allreduce,
            "broadcast": self._broadcast,
            "allgather": self._allgather,
            "alltoall": self._alltoall,
            "reducescatter": self._reducescatter,
        }

    def perform(self, requests: Sequence[tuple[Request, tuple[int, ...]]]) -> None:
        """Runs the requests. Every rank of the set calls it with the same requests, in the same
        order. Each request is paired with the buckets of the ranks that made it."""
        results: Results = {}
        with self._streams.behind([request for request, _ in requests]) as streams:
            waits = [self._begin(batch, results) for batch in batches(requests, self._fusion_bytes)]
            for wait in waits:
                wait()
            made = [stream.record_event() for stream in streams]
        for request, _ in requests:
            request.finish(
                [results[id(request), index] for index in range(len(request.inputs))], made
            )

    def _begin(self, batch: Batch, results: Results) -> Callable[[], None]:
        """Starts a batch; the returned function ends the collective."""
        start = self._start[batch.signature.kind]
        kind = batch.signature.kind
        if not self._timeline.is_on:
            return start(batch, results)
        is_done_at_once = kind != "allreduce" or "asynchronous" not in self._communicator.features
        return self._timeline.timed(
            batch, lambda: start(batch, results), is_done_at_once=is_done_at_once
        )

    def _start_allreduce(self, batch: Batch, results: Results) -> Callable[[], None]:
        signature = batch.signature
        targets = [self._target(unit) for unit in batch.units]
        is_alone = len(targets) == 1 and self._stays(targets[0]) and targets[0].is_contiguous()
        # A pending collective needs a separate buffer; the shared one is for engines whose
        # start_allreduce() waits.
        packed = (
            Packed(targets[0].view(-1), targets)
            if is_alone
            else self._packed([unit.source for unit in batch.units])
        )
        flat = packed.flat
        if is_alone and targets[0].data_ptr() != batch.units[0].source.data_ptr():
            targets[0].copy_(batch.units[0].source)
        _prescale_(flat, batch)
        op = "sum" if signature.op == "average" else signature.op
        reduced = start_reduce_(self._communicator, flat, op, signature.name)

        def wait() -> None:
            reduced()
            finish_reduction_(flat, signature.op, batch.givers, signature.postscale)
            if not is_alone:
                packed.unpack(targets)
            _hand_out(batch.units, targets, results)

        if "asynchronous" in self._communicator.features:
            return wait
        wait()
        return lambda: None

    def _target(self, unit: RequestTensor) -> torch.Tensor:
        target = unit.target()
        return (
            torch.empty_like(unit.source, memory_format=torch.contiguous_format)
            if target is None
            else target
        )

    def _stays(self, tensor: torch.Tensor) -> bool:
        """Whether the engine takes the tensor in place; else it is copied to host memory."""
        return (
            tensor.device.type == "cpu"
            or "nccl" in self._communicator.features
            or isinstance(self._communicator, SingleProcessCommunicator)
        )

    def _packed(self, sources: Sequence[torch.Tensor]) -> Packed:
        """A buffer with the tensors one after another."""
        first = sources[0]
        if not self._stays(first):
            return self._packed_on_host(sources)
        total = sum(source.numel() for source in sources)
        flat = self._buffer(total, first)
        pieces = _pieces(flat, sources)
        if total:
            torch._foreach_copy_(pieces, list(sources))
        return Packed(flat, pieces)

    def _packed_on_host(self, sources: Sequence[torch.Tensor]) -> Packed:
        """Packs tensors of a GPU there, so that the host waits for one copy."""
        first = sources[0]
        device = (
            first.reshape(-1) if len(sources) == 1 else torch.cat([s.view(-1) for s in sources])
        )
        # a new one: the copy from an earlier one may be under way, and torch keeps freed memory
        flat = torch.empty(len(device), dtype=first.dtype, device="cpu", pin_memory=True)
        flat.copy_(device, non_blocking=True)
        self._streams.finish(first.device)
        if len(sources) == 1:
            return Packed(flat, _pieces(flat, sources))
        return Packed(flat, _pieces(device, sources), device)

    def _buffer(self, total: int, like: torch.Tensor) -> torch.Tensor:
        if "asynchronous" in self._communicator.features:
            return torch.empty(total, dtype=like.dtype, device=like.device)
        key = like.dtype, like.device
        whole = self._buffers.get(key)
        if whole is None or whole.numel() < total:
            whole = torch.empty(total, dtype=like.dtype, device=like.device)
            self._buffers[key] = whole
        return whole[:total]

    def _broadcast(self, batch: Batch, results: Results) -> Callable[[], None]:
        targets = [self._target(unit) for unit in batch.units]
        root = self._ranks.index(batch.signature.root)
        is_alone = len(targets) == 1 and self._stays(targets[0]) and targets[0].is_contiguous()
        is_root = self._communicator.rank == root
        if is_root:
            for unit, target in zip(batch.units, targets, strict=True):
                if target.data_ptr() != unit.source.data_ptr():
                    target.copy_(unit.source)
        packed = (
            Packed(targets[0].view(-1), targets)
            if is_alone
            else self._packed([unit.source for unit in batch.units])
        )
        if packed.flat.numel():
            self._communicator.broadcast(as_bytes(packed.flat), batch.signature.name, root)
            if not is_alone and not is_root:
                packed.unpack(targets)
        _hand_out(batch.units, targets, results)
        return lambda: None

    def _allgather(self, batch: Batch, results: Results) -> Callable[[], None]:
        units = batch.units
        size = self._communicator.size
        rows = np.array([len(unit.source) for unit in units])
        lengths = self._communicator.allgather(rows, batch.signature.name).reshape(size, len(units))
        row_bytes = np.array([_row_bytes(unit.source) for unit in units])
        for start, end in runs((lengths * row_bytes).sum(0).tolist(), self._fusion_bytes):
            self._gather(units[start:end], lengths[:, start:end], results)
        return lambda: None

    def _gather(
        self, units: Sequence[RequestTensor], lengths: np.ndarray, results: Results
    ) -> None:
        """Gathers units. lengths: of axis 0, of each rank's units."""
        flats = [as_bytes(self._placed(unit.source).reshape(-1)) for unit in units]
        # on a single rank, the gathered data is the rank's own memory
        is_copy = len(units) == 1 and self._communicator.size > 1
        widths = [_row_bytes(unit.source) for unit in units]
        gathered = self._gathered(
            _joined(flats), lengths @ np.array(widths), units[0].request.signature.name
        )
        parts = gathered.split(
            [
                length * width
                for row in lengths.tolist()
                for length, width in zip(row, widths, strict=True)
            ]
        )
        for index, unit in enumerate(units):  # every unit of rank 0, every unit of rank 1, ...
            whole = gathered if is_copy else torch.cat(parts[index :: len(units)])
            whole = whole.view(unit.source.dtype).view(
                int(lengths[:, index].sum()), *unit.source.shape[1:]
            )
            results[id(unit.request), unit.place] = whole.to(unit.source.device)

    def _gathered(self, flat: torch.Tensor, of_ranks: np.ndarray, name: str) -> torch.Tensor:
        """Gathers the bytes of every rank. of_ranks: how many each has; otherwise the engine would
        exchange lengths, and the host would wait for its GPU."""
        if len(set(of_ranks.tolist())) > 1 or self._communicator.size == 1:
            return self._communicator.allgather(flat, name)
        rows = flat.new_empty((self._communicator.size, len(flat)))
        rows[self._communicator.rank].copy_(flat)
        found: torch.Tensor = self._communicator.start_spread(rows, name).wait()
        return found.view(-1)

    def _placed(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self._stays(tensor) else tensor.cpu()

    def _alltoall(self, batch: Batch, results: Results) -> Callable[[], None]:
        size = self._communicator.size
        rank = self._communicator.rank
        for unit in batch.units:
            splits = list(unit.request.splits)
            table = self._communicator.allgather(
                np.array(splits, np.int64), batch.signature.name
            ).reshape(size, size)
            received = [int(n) for n in table[:, rank]]
            source = unit.source.cpu()
            rows = source.new_empty((sum(received), *source.shape[1:]))
            swap(
                self._communicator,
                source[: sum(splits)].split(splits),
                rows.split(received),
                batch.signature.name,
            )
            results[id(unit.request), unit.place] = rows.to(unit.source.device), received
        return lambda: None

    def _reducescatter(self, batch: Batch, results: Results) -> Callable[[], None]:
        """Each rank receives its rows from all ranks and reduces them. The first ranks have one
        more if they do not divide evenly."""
        signature = batch.signature
        size = self._communicator.size
        rank = self._communicator.rank
        if batch.units[0].source.device.type != "cpu" and self._stays(batch.units[0].source):
            return self._reducescatter_on_device(batch, results)
        sources = [unit.source.cpu() for unit in batch.units]
        mine = [
            _joined([source[part_of(len(source), other, size)].view(-1) for source in sources])
            for other in range(size)
        ]
        if signature.prescale != 1.0:
            mine = [part.clone() for part in mine]
            for other, part in enumerate(mine):
                _prescale_(
                    part,
                    batch,
                    [source[part_of(len(source), other, size)].numel() for source in sources],
                )
        theirs = [
            part if other == rank else torch.empty_like(mine[rank])
            for other, part in enumerate(mine)
        ]
        swap(self._communicator, mine, theirs, signature.name)
        total = reduced("sum" if signature.op == "average" else signature.op, theirs, rank)
        finish_reduction_(total, signature.op, batch.givers, signature.postscale)
        own = _pieces(total, [source[part_of(len(source), rank, size)] for source in sources])
        for unit, part in zip(batch.units, own, strict=True):
            results[id(unit.request), unit.place] = part.to(unit.source.device, copy=len(own) > 1)
        return lambda: None

    def _reducescatter_on_device(self, batch: Batch, results: Results) -> Callable[[], None]:
        """Computes sums with the engine's reduce-scatter, and other reductions with an allreduce
        from which this rank keeps its rows."""
        signature = batch.signature
        if signature.op in ("sum", "average") and is_for_engine(
            self._communicator, batch.units[0].source, "sum"
        ):
            return self._scatter_sums(batch, results)
        packed = self._packed([unit.source for unit in batch.units])
        flat = packed.flat
        _prescale_(flat, batch)
        start_reduce_(
            self._communicator,
            flat,
            "sum" if signature.op == "average" else signature.op,
            signature.name,
        )()
        finish_reduction_(flat, signature.op, batch.givers, signature.postscale)
        for unit, whole in zip(batch.units, packed.pieces, strict=True):
            results[id(unit.request), unit.place] = whole[
                part_of(len(whole), self._communicator.rank, self._communicator.size)
            ].clone()
        return lambda: None

    def _scatter_sums(self, batch: Batch, results: Results) -> Callable[[], None]:
        signature = batch.signature
        mine = [unit.source.clone() for unit in batch.units]
        for unit, tensor in zip(batch.units, mine, strict=True):
            if not unit.request.is_stand_in:
                scale_(tensor, signature.prescale)
        sums = scattered_sums(self._communicator, mine, signature.name)
        for own in sums:
            finish_reduction_(own, signature.op, batch.givers, signature.postscale)
        _hand_out(batch.units, sums, results)
        return lambda: None


def _prescale_(flat: torch.Tensor, batch: Batch, numbers: Sequence[int] = ()) -> None:
    """Scales the units' tensors, which lie one after another in `flat`. numbers: the elements of
    each, if parts. Stand-ins are not scaled."""
    if not any(unit.request.is_stand_in for unit in batch.units):
        scale_(flat, batch.signature.prescale)
        return
    parts = flat.split(list(numbers) or [unit.source.numel() for unit in batch.units])
    for unit, part in zip(batch.units, parts, strict=True):
        if not unit.request.is_stand_in:
            scale_(part, batch.signature.prescale)


def check_splits(splits: Sequence[int], rows: int, size: int, where: str) -> None:
    """Raises BadCall unless there is one split for each rank of the set, and their sum is at most
    the rows."""
    if len(splits) != size:
        raise BadCall(
            f"{len(splits)} splits for {size} ranks",
            where,
            "one number of rows for each rank of the process set",
        )
    if min(splits, default=0) < 0 or sum(splits) > rows:
        raise BadCall(
            f"splits {list(splits)[:16]} of {rows} rows",
            where,
            "numbers of 0 or more, whose sum is at most the rows of the tensor",
        )


def _pieces(flat: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    parts = flat.split([tensor.numel() for tensor in like])
    return [part.view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenates the parts to one tensor of one dimension; a single part is returned as it is."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _hand_out(
    units: Sequence[RequestTensor], found: Sequence[torch.Tensor], results: Results
) -> None:
    for unit, tensor in zip(units, found, strict=True):
        results[id(unit.request), unit.place] = tensor


def _row_bytes(tensor: torch.Tensor) -> int:
    return int(np.prod(tensor.shape[1:], dtype=np.int64)) * tensor.element_size()


class Streams:
    """The streams of one process set, one for each GPU with tensors of its requests, so that sets
    do not wait for each other.

    They run after the earlier work in the caller's stream, and that stream waits for their results.
    A stream is a queue of work for a GPU; different streams run concurrently. Events order two
    streams on the GPU, so the host does not wait; only later work in the waiting stream does.
    """

    def __init__(self, gpus: Accelerator | None = None) -> None:
        self._gpus = gpus or Accelerator(kind_of_build())
        self._own: dict[torch.device, Stream] = {}
        self._latest: torch.device | None = None  # GPU of a request

    def ask(self, request: Request) -> None:
        """Called by the requesting thread. The collective will run after the work that is now in
        its current streams."""
        if self._gpus.kind not in request.signature.devices:
            return
        devices = self._devices(request.inputs)
        request.asked = [self._gpus.present(device).record_event() for device in devices]
        if devices:
            self._latest = devices[0]

    def set_device(self) -> None:
        """Makes the GPU of the latest request the current one of this thread. Called by the thread
        of a process set, not by the script's."""
        if self._latest is not None:
            self._gpus.set_device(self._latest)

    def behind(self, requests: Sequence[Request]) -> AbstractContextManager[Sequence[Stream]]:
        """Called by the thread that runs collectives. Within the context, its current streams are
        the set's streams, ordered after the requests' inputs."""
        on_gpus = [request for request in requests if self._gpus.kind in request.signature.devices]
        return self._behind(on_gpus) if on_gpus else nullcontext(())

    @contextmanager
    def _behind(self, on_gpus: Sequence[Request]) -> Iterator[Sequence[Stream]]:
        devices = self._devices(tensor for request in on_gpus for tensor in request.inputs)
        streams = {device: self._stream(device) for device in devices}
        for request in on_gpus:
            for event in request.asked:
                streams[event.device].wait_event(event)
            for tensor in (*request.inputs, *request.outputs):
                if tensor.device in streams:
                    self._gpus.keep(tensor, streams[tensor.device])
        with ExitStack() as present:
            for stream in streams.values():
                present.enter_context(self._gpus.use(stream))
            yield list(streams.values())

    def finish(self, device: torch.device) -> None:
        """Waits for the work of this thread's current stream of a GPU."""
        self._gpus.present(device).synchronize()

    def receive(self, request: Request) -> None:
        """Called by the thread that waited for the request. Its current streams then wait for the
        results."""
        for event in request.made:
            self._gpus.present(event.device).wait_event(event)
        if request.made:
            for result in request.result:
                tensor = result[0] if isinstance(result, tuple) else result
                if tensor.device.type == self._gpus.kind:
                    self._gpus.keep(tensor, self._gpus.present(tensor.device))

    def _devices(self, tensors: Iterable[torch.Tensor]) -> list[torch.device]:
        """Returns the GPUs of tensors, each once."""
        return list(
            dict.fromkeys(
                tensor.device for tensor in tensors if tensor.device.type == self._gpus.kind
            )
        )

    def _stream(self, device: torch.device) -> Stream:
        if device not in self._own:
            self._own[device] = self._gpus.new(device)
        return self._own[device]
