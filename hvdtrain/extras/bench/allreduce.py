"""bench allreduce: how fast the ranks sum vectors, compared with a plain MPI_Allreduce and a memory
copy in the same run.

Every method must first give the known sum of values that differ by rank. The seconds of a method
are the slowest rank's.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from hvdtrain.cli.output import align, plural, print_result
from hvdtrain.comm.communicator import Communicator, part_of
from hvdtrain.comm.launcher_variables import Placement, placement
from hvdtrain.errors import UserError
from hvdtrain.extras.bench.options import BenchParser, format_bytes, format_seconds, read_sizes
from hvdtrain.extras.bench.trainer import median_speedup, quartiles, run_on_ranks
from hvdtrain.extras.plan.meshes.link import IN_PARTS
from hvdtrain.features.every_feature import configure

SIZES = "1,64,1KiB,16KiB,256KiB,1MiB,4MiB,16MiB,64MiB,100MB"
MIN_ROUNDS = 5
MAX_ROUNDS = 101
WARM_UP_ROUNDS = 2
QUIET_S = 2.0  # after that, progress is printed
SMALL_TENSORS = "160 small tensors"
# Channels of ResNet-50's 53 norms, in order: each norm has a weight and a bias; repeated up to 160
# tensors of 64 to 2048 elements.
_BLOCKS = ((64, 3), (128, 4), (256, 6), (512, 3))
_NORMS = [
    64,
    *(n for width, blocks in _BLOCKS for n in (4 * width, *(width, width, 4 * width) * blocks)),
]
SMALL_TENSOR_SIZES = [_NORMS[index // 2 % len(_NORMS)] for index in range(160)]


class Method(NamedTuple):
    """A method that replaces a vector by its sum over ranks; the copy, for comparison, does not
    change it."""

    name: str
    run: Callable[[], object]


class AllreduceRanks(NamedTuple):
    """The ranks of the benchmark."""

    communicator: Communicator
    mpi_world: Any | None  # a communicator of mpi4py, if MPI runs
    bucket_bytes: int


def bench_allreduce(arguments: Sequence[str]) -> int:
    """Runs `bench allreduce`; returns the exit code. Every rank calls it, rank 0 prints. Raises
    UserError."""
    parser = BenchParser("allreduce")
    parser.add_argument("--sizes", type=read_sizes, default=SIZES)
    parser.add_argument("--budget", type=float, default=40.0)
    options, overrides = parser.parse_known_args(arguments)
    config = configure(options.config, overrides)

    def work(communicator: Communicator, engine_reason: str) -> None:
        bucket_bytes = max(4, config.comm.bucket_bytes())
        ranks = AllreduceRanks(
            communicator, _connect_mpi(communicator, placement(os.environ)), bucket_bytes
        )
        payloads = measure(ranks, options.sizes, options.budget)
        host_of_rank = communicator.allgather_object(
            (socket.gethostname(), len(os.sched_getaffinity(0)))
        )
        if communicator.rank == 0:
            hosts = count_hosts(host_of_rank)
            result = AllreduceResult(
                communicator.name, engine_reason, communicator.size, bucket_bytes, hosts, payloads
            )
            print_result(options.json, to_text(result), to_json(result))

    return run_on_ranks(config, work)


def _connect_mpi(communicator: Communicator, place: Placement) -> Any | None:
    """Returns a separate MPI communicator of all ranks, or None on all ranks."""
    from hvdtrain.comm import mpi

    if "plain_mpi" not in communicator.features and not mpi.connect_beside(communicator, place):
        return None
    return mpi.load().COMM_WORLD.Dup()


def measure(ranks: AllreduceRanks, sizes: Sequence[int], budget_s: float) -> list[PayloadTimes]:
    """Times one vector of each size in bytes, then many small tensors, with all methods. A
    collective; every rank gets the same times."""
    payload_budget_s = budget_s / (len(sizes) + 1)
    began = time.perf_counter()
    payloads: list[PayloadTimes] = []
    for size_bytes in sizes:
        vector = (
            np.empty(size_bytes // 4, np.float32)
            if size_bytes % 4 == 0
            else np.empty(size_bytes, np.uint8)
        )
        times = _time_methods(
            ranks, vector, list(_methods_for_vector(ranks, vector)), payload_budget_s
        )
        payloads.append(PayloadTimes(format_bytes(size_bytes), size_bytes, times))
        if ranks.communicator.rank == 0 and time.perf_counter() - began > QUIET_S:
            print(
                f"bench allreduce: {payloads[-1].name} done, {len(payloads)} of {len(sizes) + 1}",
                file=sys.stderr,
                flush=True,
            )
    flat = np.empty(sum(SMALL_TENSOR_SIZES), np.float32)
    times = _time_methods(ranks, flat, list(_methods_for_tensors(ranks, flat)), payload_budget_s)
    payloads.append(PayloadTimes(SMALL_TENSORS, flat.nbytes, times))
    return payloads


def _methods_for_vector(ranks: AllreduceRanks, vector: np.ndarray) -> Iterator[Method]:
    communicator = ranks.communicator
    name = f"bench.{vector.nbytes}"
    if ranks.mpi_world is not None:
        mpi_allreduce = _mpi_allreduce(ranks.mpi_world)
        yield Method(MPI, lambda: mpi_allreduce(vector))
    yield Method(
        "allreduce", lambda: _copy_unless_same(vector, communicator.allreduce(vector, name))
    )
    bucket_elements = max(1, ranks.bucket_bytes // vector.itemsize)
    buckets = [
        vector[start : start + bucket_elements] for start in range(0, len(vector), bucket_elements)
    ]
    yield Method(
        f"in {plural(len(buckets), 'bucket')}", lambda: _allreduce_all(communicator, buckets, name)
    )
    yield Method(IN_PARTS, lambda: _in_parts(communicator, vector, name))
    target = np.empty_like(vector)
    yield Method(COPY, lambda: np.copyto(target, vector))


def _in_parts(communicator: Communicator, vector: np.ndarray, name: str) -> None:
    """Reduces by a reduce-scatter and an allgather, as for sharded training state."""
    own = part_of(len(vector), communicator.rank, communicator.size)
    part = communicator.start_reduce_scatter(vector, f"{name}.parts").wait()
    _copy_unless_same(vector[own], part)
    _copy_unless_same(vector, communicator.start_spread(vector, f"{name}.spread").wait())


def _mpi_allreduce(mpi_world: Any) -> Callable[[np.ndarray], None]:
    """Runs MPI_Allreduce in place."""
    from hvdtrain.comm import mpi

    in_place = mpi.load().IN_PLACE
    return lambda vector: mpi_world.Allreduce(in_place, vector)


def _methods_for_tensors(ranks: AllreduceRanks, flat: np.ndarray) -> Iterator[Method]:
    """Returns methods for many small tensors, which are views of `flat`. Methods that reduce one
    bucket copy the tensors in and out, which is included in the time."""
    communicator = ranks.communicator
    bucket = np.empty_like(flat)
    tensors = np.split(flat, np.cumsum(SMALL_TENSOR_SIZES)[:-1])
    slices = np.split(bucket, np.cumsum(SMALL_TENSOR_SIZES)[:-1])

    def copy_in() -> None:
        for slice_, tensor in zip(slices, tensors, strict=True):
            slice_[...] = tensor

    def copy_out() -> None:
        for slice_, tensor in zip(slices, tensors, strict=True):
            tensor[...] = slice_

    if ranks.mpi_world is not None:
        mpi_allreduce = _mpi_allreduce(ranks.mpi_world)

        def by_mpi() -> None:
            copy_in()
            mpi_allreduce(bucket)
            copy_out()

        yield Method(MPI, by_mpi)

    def by_bucket() -> None:
        copy_in()
        _copy_unless_same(bucket, communicator.start_allreduce(bucket, "bench.packed").wait())
        copy_out()

    yield Method("as one bucket", by_bucket)
    yield Method("one allreduce each", lambda: _allreduce_all(communicator, tensors, "bench.small"))
    if "horovod_api" in communicator.features:
        from hvdtrain.comm import horovod

        torch, hvd = horovod.load()
        torch_tensors = [torch.from_numpy(tensor) for tensor in tensors]
        yield Method(
            GROUPED, lambda: hvd.grouped_allreduce_(torch_tensors, name="bench.grouped", op=hvd.Sum)
        )
    yield Method(COPY, lambda: np.copyto(bucket, flat))


def _allreduce_all(communicator: Communicator, arrays: Sequence[np.ndarray], name: str) -> None:
    """Starts an allreduce of each array, then waits for all."""
    handles = [
        communicator.start_allreduce(array, f"{name}.{index}") for index, array in enumerate(arrays)
    ]
    for array, handle in zip(arrays, handles, strict=True):
        _copy_unless_same(array, handle.wait())


def _copy_unless_same(target: np.ndarray, result: np.ndarray) -> None:
    """Copies the result into `target` unless the engine returned the same memory."""
    if result is not target:
        target[...] = result


def _time_methods(
    ranks: AllreduceRanks, vector: np.ndarray, methods: Sequence[Method], budget_s: float
) -> list[MethodTimes]:
    """Returns the slowest rank's seconds of each method in each round. A round runs all methods
    once, starting with another one each time."""
    for method in methods:
        check_sum(ranks.communicator, vector, method)
    vector.fill(0)  # repeated sums in place would overflow; zeros stay zeros
    began = time.perf_counter()
    for _ in range(WARM_UP_ROUNDS):
        _run_round(ranks, methods, first=0)
    local_round_s = np.array([(time.perf_counter() - began) / WARM_UP_ROUNDS])
    round_s = float(ranks.communicator.allreduce(local_round_s, "bench.round", "max")[0])
    # equal on all ranks, as round_s is
    rounds = int(min(MAX_ROUNDS, max(MIN_ROUNDS, budget_s / round_s)))
    local_seconds = np.array(
        [_run_round(ranks, methods, first=number % len(methods)) for number in range(rounds)]
    )
    # (rounds, methods)
    slowest = ranks.communicator.allreduce(local_seconds, "bench.slowest", "max")
    return [
        MethodTimes(method.name, slowest[:, index].tolist()) for index, method in enumerate(methods)
    ]


def _run_round(ranks: AllreduceRanks, methods: Sequence[Method], first: int) -> list[float]:
    """Returns seconds of each method on this rank; the ranks start each method together."""
    seconds = [0.0] * len(methods)
    order = [*range(first, len(methods)), *range(first)]
    for index in order:
        if ranks.mpi_world is not None:
            ranks.mpi_world.Barrier()
        else:
            ranks.communicator.allreduce(np.zeros(1, np.float32), "bench.barrier")
        began = time.perf_counter()
        methods[index].run()
        seconds[index] = time.perf_counter() - began
    return seconds


def check_sum(communicator: Communicator, vector: np.ndarray, method: Method) -> None:
    """Raises UserError on every rank if the method computes a wrong sum on any rank.

    Element i of rank r is (r + 1) x (i % 7 + 1), so its sum over n ranks is n (n + 1) / 2 x (i % 7
    + 1); modulo 256 in uint8.
    """
    dtype = vector.dtype.type
    pattern = (np.arange(len(vector)) % 7 + 1).astype(dtype)
    vector[...] = pattern * dtype((communicator.rank + 1) % 256)
    method.run()
    factor = (
        communicator.rank + 1
        if method.name == COPY
        else communicator.size * (communicator.size + 1) // 2
    )
    expected = pattern * dtype(factor % 256 if dtype is np.uint8 else factor)
    wrong_elements = communicator.allgather_object(int((vector != expected).sum()))
    if any(wrong_elements):
        ranks = [rank for rank, count in enumerate(wrong_elements) if count]
        where = f"{method.name}, comm.engine={communicator.name}, {vector.nbytes} bytes"
        raise UserError(f"wrong sums on ranks {ranks}", where, "hvdtrain check")


MPI = "plain MPI_Allreduce"
COPY = "copy of memory"

GROUPED = "hvd.grouped_allreduce"

_COLUMNS = ("", "", "rounds", "median", "quartiles", "GB/s", "x MPI")
_NOTES = (
    "median, quartiles: of the slowest rank's seconds; each round runs all methods in turn",
    "GB/s: bus bandwidth, 2 (n - 1) / n x bytes / median; for the copy bytes / median",
    "x MPI: how many times as fast as MPI_Allreduce in the same round, median over rounds",
)


class MethodTimes(NamedTuple):
    """One method of reducing, and the slowest rank's seconds in each round."""

    method: str
    seconds: list[float]


class PayloadTimes(NamedTuple):
    """The times of all methods for one vector, or for many tensors."""

    name: str
    size_bytes: int
    methods: list[MethodTimes]


class BenchHost(NamedTuple):
    name: str
    ranks: int
    cores: int


class AllreduceResult(NamedTuple):
    engine: str
    engine_reason: str
    ranks: int
    bucket_bytes: int
    hosts: list[BenchHost]
    payloads: list[PayloadTimes]


def count_hosts(ranks: Sequence[tuple[str, int]]) -> list[BenchHost]:
    """Returns the hosts, from (host name, cores) of each rank."""
    ranks_on_host = Counter(name for name, _ in ranks)
    cores = dict(ranks)
    return [BenchHost(name, count, cores[name]) for name, count in ranks_on_host.items()]


def bus_bytes_per_s(method: str, size_bytes: int, ranks: int, seconds: float) -> float:
    """Returns the bytes per second that cross each rank's link in a ring allreduce; for the memory
    copy, the bytes copied."""
    crossing = size_bytes if method == COPY else 2 * (ranks - 1) / ranks * size_bytes
    return crossing / seconds


def oversubscription_warning(hosts: Iterable[BenchHost]) -> list[str]:
    """Returns a warning if hosts have more ranks than cores, since times are then not
    comparable."""
    crowded = [
        f"{host.ranks} ranks on {host.cores} cores" for host in hosts if host.ranks > host.cores
    ]
    if not crowded:
        return []
    return [
        f"OVERSUBSCRIBED: {', '.join(crowded)}: ranks share cores, so times are longer than with "
        "a core for each rank"
    ]


def to_text(result: AllreduceResult) -> list[str]:
    """Formats the report as text."""
    return [
        f"hvdtrain bench allreduce: {plural(result.ranks, 'rank')}, engine {result.engine} "
        f"({result.engine_reason}), "
        f"buckets of {format_bytes(result.bucket_bytes)}",
        "; ".join(
            f"{host.name}: {plural(host.ranks, 'rank')}, {host.cores} cores"
            for host in result.hosts
        ),
        *oversubscription_warning(result.hosts),
        "",
        *align([_COLUMNS, *_rows(result)], left=(0, 1)),
        "",
        *_NOTES,
        *_compared_with_grouped(result.payloads),
    ]


def _rows(result: AllreduceResult) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for payload in result.payloads:
        mpi_seconds = _seconds_of(payload, MPI)
        for index, (method, seconds) in enumerate(payload.methods):
            low, median, high = quartiles(seconds)
            rows.append(
                (
                    payload.name if index == 0 else "",
                    method,
                    str(len(seconds)),
                    format_seconds(median),
                    f"{format_seconds(low)} .. {format_seconds(high)}",
                    f"{bus_bytes_per_s(method, payload.size_bytes, result.ranks, median) / 1e9:.3g}",  # noqa: E501
                    f"{median_speedup(seconds, mpi_seconds):.2f}" if mpi_seconds else "",
                )
            )
    return rows


def _seconds_of(payload: PayloadTimes, method: str) -> list[float] | None:
    return next((times.seconds for times in payload.methods if times.method == method), None)


def _compared_with_grouped(payloads: Sequence[PayloadTimes]) -> list[str]:
    """Compares many small tensors with Horovod's grouped allreduce."""
    lines = []
    for payload in payloads:
        grouped_seconds = _seconds_of(payload, GROUPED)
        if grouped_seconds is None:
            continue
        others = [times for times in payload.methods if times.method not in (GROUPED, COPY)]
        shares = ", ".join(
            f"{times.method} {1 / median_speedup(times.seconds, grouped_seconds):.2f}"
            for times in others
        )
        lines.append(f"{payload.name}, time / time of {GROUPED}: {shares}")
    return lines


def to_json(result: AllreduceResult) -> dict[str, Any]:
    """Returns the report as JSON, with the seconds of every round."""
    rows = []
    for payload in result.payloads:
        for method, seconds in payload.methods:
            low, median, high = quartiles(seconds)
            rows.append(
                {
                    "what": payload.name,
                    "bytes": payload.size_bytes,
                    "method": method,
                    "n": len(seconds),
                    "quartiles_s": [low, median, high],
                    "bytes_per_s": bus_bytes_per_s(
                        method, payload.size_bytes, result.ranks, median
                    ),
                    "seconds": seconds,
                }
            )
    return {
        "engine": result.engine,
        "why": result.engine_reason,
        "ranks": result.ranks,
        "bucket_bytes": result.bucket_bytes,
        "hosts": {host.name: {"ranks": host.ranks, "cores": host.cores} for host in result.hosts},
        "rows": rows,
    }
