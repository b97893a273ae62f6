"""A recording NCCL: collectives of simulated GPUs, by Gloo on the host's memory.

A collective reads its tensors when it is called, and writes its results when something waits for
it, as late as NCCL may. Ranks compare what they call before each collective: another order,
operation, type or count is an error that names both. `calls` lists them. A message is compared
with the one that its partner takes it for, and `messages` lists them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch.futures import Future

from simulated_gpu.load import Gpu

Tensors = list[torch.Tensor]
LIMIT = timedelta(seconds=60)  # for a rank that never calls the same collective
calls: list[Call] = []  # of this process, in order
messages: list[Message] = []
TAG = 2**20  # of messages between GPUs, above those of the host
TEXT_BYTES = 64


class Call(NamedTuple):
    """A collective that this rank has called."""

    group: str
    number: int  # in its group
    operation: str  # "allreduce SUM"
    dtype: str
    count: int
    stream: str  # the current stream, "default" or "side"


class Message(NamedTuple):
    """A message that this rank has sent or received."""

    kind: Literal["send", "recv"]
    group: str
    peer: int  # in the group
    number: int  # of this kind and peer
    dtype: str
    count: int


def install(gpu: Gpu) -> None:
    """Makes torch.distributed find NCCL. Once in a process."""
    module: Any = dist.distributed_c10d
    module._NCCL_AVAILABLE = True
    module.default_pg_nccl_timeout = timedelta(minutes=10)
    module.ProcessGroupNCCL = RecordingNccl
    RecordingNccl.gpu = gpu


# its methods have several signatures; torch calls the ones below
_ProcessGroup: Any = dist.ProcessGroup


class RecordingNccl(_ProcessGroup):
    """A process group for tensors on the GPU, recorded, and in host memory, by Gloo."""

    gpu: Gpu
    Options = SimpleNamespace

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, LIMIT)
        self._options = options
        self._name = str(options.group_name)
        self._count = 0
        self._stream: Any = None
        self._links: dict[int, Any] = {}  # the stream of messages from and to each rank
        self._numbers: Counter[tuple[str, int]] = Counter()

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def group_desc(self) -> str:
        return "nccl"

    @property
    def bound_device_id(self) -> None:
        return None

    @property
    def options(self) -> Any:
        return self._options

    def getGroupName(self) -> str:
        return self._name

    def getGroupDesc(self) -> str:
        return "nccl"

    def getBackendName(self) -> str:
        return "nccl"

    def name(self) -> str:
        return "nccl"

    def _set_sequence_number_for_group(self) -> None:
        pass

    def _get_backend(self, device: torch.device) -> Any:
        return self._gloo if device.type == "cpu" else self

    def set_timeout(self, timeout: timedelta) -> None:
        pass

    def _set_default_timeout(self, timeout: timedelta) -> None:
        pass

    def shutdown(self) -> None:
        pass

    abort = shutdown

    def allreduce(self, tensors: Tensors, options: Any) -> Any:
        if not tensors[0].is_cuda:
            return self._by_host("allreduce").allreduce(tensors, options)
        return self._in_place("allreduce", tensors, options)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Tensors, options: Any) -> Any:
        if not tensors[0].is_cuda:
            return self._by_host("reduce").reduce(tensors, options)
        is_root = self.rank() == options.rootRank
        return self._in_place("reduce", tensors, options, is_kept=is_root)

    def broadcast(self, tensors: Tensors, options: Any) -> Any:
        if not tensors[0].is_cuda:
            return self._by_host("broadcast").broadcast(tensors, options)

        def start(hosts: Tensors) -> tuple[list[Any], Tensors]:
            return [self._gloo.broadcast([host], options) for host in hosts], hosts

        return self._call(f"broadcast from {options.rootRank}", tensors, tensors, start)

    def allgather(self, outputs: list[Tensors], inputs: Tensors, options: Any = None) -> Any:
        if not inputs[0].is_cuda:
            return self._by_host("allgather").allgather(outputs, inputs)
        flat = [part for parts in outputs for part in parts]

        def start(hosts: Tensors) -> tuple[list[Any], Tensors]:
            found = [[torch.empty_like(host) for _ in range(self.size())] for host in hosts]
            return [self._gloo.allgather(found, hosts)], [part for parts in found for part in parts]

        return self._call("allgather", inputs, flat, start)

    def all_gather_single(
        self, output: torch.Tensor, tensor: torch.Tensor, options: Any = None
    ) -> Any:
        if not tensor.is_cuda:
            return self._by_host("allgather")._allgather_base(output, tensor)
        return self._gather([output], [tensor])

    _allgather_base = all_gather_single

    def allgather_into_tensor_coalesced(
        self, outputs: Tensors, inputs: Tensors, options: Any = None
    ) -> Any:
        return self._gather(outputs, inputs)

    def reduce_scatter_single(
        self, output: torch.Tensor, tensor: torch.Tensor, options: Any
    ) -> Any:
        return self._scatter_sums([output], [tensor], options)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_tensor_coalesced(
        self, outputs: Tensors, inputs: Tensors, options: Any
    ) -> Any:
        return self._scatter_sums(outputs, inputs, options)

    def alltoall_base(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_rows: list[int],
        rows: list[int],
        options: Any,
    ) -> Any:
        if not tensor.is_cuda:
            return self._by_host("alltoall").alltoall_base(
                output, tensor, output_rows, rows, options
            )

        def start(hosts: Tensors) -> tuple[list[Any], Tensors]:
            found = torch.empty(output.shape, dtype=output.dtype)
            work = self._gloo.alltoall_base(found, hosts[0], output_rows, rows, options)
            return [work], [found]

        return self._call("alltoall", [tensor], [output], start)

    def send(self, tensors: Tensors, to: int, tag: int) -> Any:
        if not tensors[0].is_cuda:
            return self._by_host("send").send(tensors, to, tag)
        (tensor,) = tensors
        message, here = self._message("send", tensor, to)
        self.gpu.finish_stream(tensor.device.index, here.stream_id)
        host = _host(tensor).contiguous().clone()
        tag = TAG + 2 * message.number
        works = [self._gloo.send([_text(message)], to, tag), self._gloo.send([host], to, tag + 1)]

        def finish() -> None:
            for work in works:
                work.wait()

        return Work(self.gpu, self._links[to], finish, tensors)

    def recv(self, tensors: Tensors, source: int, tag: int) -> Any:
        if not tensors[0].is_cuda:
            return self._by_host("recv").recv(tensors, source, tag)
        (tensor,) = tensors
        message, _ = self._message("recv", tensor, source)
        tag = TAG + 2 * message.number
        theirs = torch.empty(TEXT_BYTES, dtype=torch.uint8, device="cpu")
        host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        announced = self._gloo.recv([theirs], source, tag)
        received = self._gloo.recv([host], source, tag + 1)

        def finish() -> None:
            announced.wait()
            sent, own = (bytes(each.tolist()).decode().strip() for each in (theirs, _text(message)))
            assert sent == own, f"rank {source} sends {sent}, rank {self.rank()} receives {own}"
            received.wait()
            _host(tensor).copy_(host)

        return Work(self.gpu, self._links[source], finish, tensors)

    def _message(
        self, kind: Literal["send", "recv"], tensor: torch.Tensor, peer: int
    ) -> tuple[Message, Any]:
        """Notes it, behind the present work of the current stream, which it returns."""
        device = tensor.device
        here = torch.cuda.current_stream(device)
        link = self._links.setdefault(peer, torch.cuda.Stream(device))
        number = self._numbers[kind, peer]
        self._numbers[kind, peer] += 1
        message = Message(kind, self._name, peer, number, str(tensor.dtype), tensor.numel())
        messages.append(message)
        # NCCL has one queue for what two ranks send to each other
        kinds = {other for other, rank in self._numbers if rank == peer}
        assert len(kinds) == 1, f"rank {self.rank()} sends to rank {peer} and receives from it"
        if kind == "send":
            torch.ops.simulated_gpu.use(tensor, False, "NCCL send")
        link.wait_stream(here)
        if kind == "recv":
            with torch.cuda.device(device):
                self.gpu.set_stream(device.index, link.stream_id)
                torch.ops.simulated_gpu.use(tensor, True, "NCCL recv")
                self.gpu.set_stream(device.index, here.stream_id)
        return message, here

    def recv_anysource(self, tensors: Tensors, tag: int) -> Any:
        return self._by_host("recv").recv_anysource(tensors, tag)

    def barrier(self, options: Any = None) -> Any:
        return self._by_host("barrier").barrier()

    def _by_host(self, what: str) -> Any:
        """Gloo, for tensors in host memory."""
        self.gpu.recorder.add("exchange", what)
        return self._gloo

    def _in_place(
        self, operation: str, tensors: Tensors, options: Any, *, is_kept: bool = True
    ) -> Work:
        op, divisor = self._op(options.reduceOp)

        def start(hosts: Tensors) -> tuple[list[Any], Tensors]:
            return [self._sum(host, op) for host in hosts], hosts

        outputs = tensors if is_kept else []
        return self._call(
            f"{operation} {_name(options.reduceOp)}", tensors, outputs, start, divisor
        )

    def _gather(self, outputs: Tensors, inputs: Tensors) -> Work:
        def start(hosts: Tensors) -> tuple[list[Any], Tensors]:
            found = [
                torch.empty(output.shape, dtype=output.dtype, device="cpu") for output in outputs
            ]
            parts = [list(whole.view(-1).tensor_split(self.size())) for whole in found]
            works = [
                self._gloo.allgather([into], [host.view(-1)])
                for into, host in zip(parts, hosts, strict=True)
            ]
            return works, found

        return self._call("allgather", inputs, outputs, start)

    def _scatter_sums(self, outputs: Tensors, inputs: Tensors, options: Any) -> Work:
        op, divisor = self._op(options.reduceOp)

        def start(hosts: Tensors) -> tuple[list[Any], Tensors]:
            works = [self._sum(host, op) for host in hosts]
            own = [host.view(-1).tensor_split(self.size())[self.rank()] for host in hosts]
            return works, [
                part.view(output.shape) for part, output in zip(own, outputs, strict=True)
            ]

        return self._call(
            f"reduce_scatter {_name(options.reduceOp)}", inputs, outputs, start, divisor
        )

    def _sum(self, host: torch.Tensor, op: Any) -> Any:
        options = dist.AllreduceOptions()
        options.reduceOp = op
        return self._gloo.allreduce([host], options)

    def _op(self, op: Any) -> tuple[Any, int]:
        """Gloo's operation, and the divisor of the result."""
        return (dist.ReduceOp.SUM, self.size()) if op == dist.ReduceOp.AVG else (op, 1)

    def _call(
        self,
        operation: str,
        inputs: Tensors,
        outputs: Tensors,
        start: Callable[[Tensors], tuple[list[Any], Tensors]],
        divisor: int = 1,
    ) -> Work:
        """start(copies of the inputs in host memory) returns Gloo's works, and the tensors in host
        memory that they write the outputs to."""
        device = inputs[0].device
        here = torch.cuda.current_stream(device)
        self._stream = self._stream or torch.cuda.Stream(device)
        name = "side" if here.stream_id else "default"
        count = sum(tensor.numel() for tensor in inputs)
        call = Call(self._name, self._count, operation, str(inputs[0].dtype), count, name)
        self._count += 1
        calls.append(call)
        agreed = self._compare(call)
        for tensor in inputs:
            torch.ops.simulated_gpu.use(tensor, False, f"NCCL {operation}")
        self.gpu.finish_stream(device.index, here.stream_id)
        hosts = [_host(tensor).contiguous().clone() for tensor in inputs]
        works, found = start(hosts)
        self._stream.wait_stream(here)
        with torch.cuda.device(device):
            before = torch.cuda.current_stream(device)
            self.gpu.set_stream(device.index, self._stream.stream_id)
            for tensor in outputs:
                torch.ops.simulated_gpu.use(tensor, True, f"NCCL {operation}")
            self.gpu.set_stream(device.index, before.stream_id)

        def finish() -> None:
            agreed()
            for work in works:
                work.wait()
            for output, result in zip(outputs, found, strict=False):
                _host(output).copy_(result if divisor == 1 else result / divisor)

        return Work(self.gpu, self._stream, finish, outputs or inputs)

    def _compare(self, call: Call) -> Callable[[], None]:
        """Starts to compare the call with the other ranks' calls. Returns a function that raises
        the error."""
        text = f"{call.number}: {call.operation} of {call.count} {call.dtype}"
        own = torch.frombuffer(bytearray(text.encode().ljust(96)[:96]), dtype=torch.uint8)
        every = [torch.empty_like(own) for _ in range(self.size())]
        work = self._gloo.allgather([every], [own])

        def finish() -> None:
            work.wait()
            texts = [bytes(each.tolist()).decode().strip() for each in every]
            assert len(set(texts)) == 1, f"ranks call different collectives of NCCL: {texts}"

        return finish


class Work(dist._Work):
    """A collective, which the current stream waits for."""

    def __init__(
        self, gpu: Gpu, stream: Any, finish: Callable[[], None], tensors: Sequence[torch.Tensor]
    ) -> None:
        super().__init__()
        self._tensors = list(tensors)
        self._error: BaseException | None = None

        def run() -> None:
            try:
                with torch.no_grad():
                    finish()
            except BaseException as error:
                self._error = error

        gpu.later(stream, run)
        self._done = stream.record_event()

    def wait(self, timeout: Any = None) -> bool:
        self._done.wait(torch.cuda.current_stream(self._tensors[0].device))
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        """Waits: a loop that polls would never end."""
        self._done.query()
        return True

    def is_success(self) -> bool:
        return self._error is None

    def result(self) -> Tensors:
        return self._tensors

    def get_future(self) -> Future[Any]:
        self.wait()
        future: Future[Any] = Future()
        future.set_result(self._tensors)
        return future


def _host(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's memory as a tensor of the CPU."""
    view: torch.Tensor = torch.ops.simulated_gpu.host_view(tensor.detach())
    return view


def _text(message: Message) -> torch.Tensor:
    text = f"{message.number}: {message.count} {message.dtype}"
    return torch.frombuffer(bytearray(text.encode().ljust(TEXT_BYTES)), dtype=torch.uint8)


def _name(op: Any) -> str:
    return next(name for name in ("SUM", "AVG", "MIN", "MAX") if op == getattr(dist.ReduceOp, name))
