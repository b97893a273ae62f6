"""What a step would cost on ranks that are not here: an alpha-beta model of allreduce, fitted to what was measured; arithmetic only."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from hvdtrain.errors import UserError

BACKWARD = 2 / 3  # of a step's computing: two products of matrices for each one of the forward pass
_UNITS = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_LINK = re.compile(r"([\w.-]+):(\d+(?:\.\d+)?(?:e-?\d+)?)(ns|us|ms|s):(\d+(?:\.\d+)?)([KMGT]?)B/s", re.ASCII)
_SECONDS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}


class Link(NamedTuple):
    """What one rank has towards another: each with its own, none shared."""

    name: str
    latency_s: float  # of one message: alpha
    bytes_per_s: float  # 1 / beta; the sum of what arrives is part of it


class Fleet(NamedTuple):
    """Ranks fill one node after the other."""

    inside: Link  # of a node
    between: Link  # nodes
    per_node: int


class Measured(NamedTuple):
    """A step that was really done."""

    samples: float  # of one rank
    crowd: float  # ranks / cores, at least 1: by so much computing takes longer
    comm_s: float  # of all gradients, if nothing were hidden; 0 on one rank
    step_s: float


class StepModel(NamedTuple):
    """step = crowd x (fixed + per_sample x samples) x (1 + shared, of two ranks or more) + the communication that is not hidden."""

    fixed_s: float
    per_sample_s: float
    shared: float  # by so much computing takes longer beside other ranks: memory, caches, cores of readers, waiting for the slowest
    exposed: float  # share of the communication that is seen, 0 to 1

    def compute_s(self, samples: float, alone: bool = False) -> float:
        return (self.fixed_s + self.per_sample_s * samples) * (1 if alone else 1 + self.shared)


def ring_s(ranks: int, size_bytes: float, link: Link) -> float:
    """Reduce-scatter and allgather round a ring: 2 (n - 1) messages of B / n."""
    return 2 * (ranks - 1) * (link.latency_s + size_bytes / ranks / link.bytes_per_s)


def tree_s(ranks: int, size_bytes: float, link: Link) -> float:
    """Up a binomial tree and down again, the whole vector each time, in one piece."""
    return 2 * math.ceil(math.log2(ranks)) * (link.latency_s + size_bytes / link.bytes_per_s)


def halving_doubling_s(ranks: int, size_bytes: float, link: Link) -> float:
    """Recursive halving, then doubling (Rabenseifner; Thakur, Rabenseifner, Gropp 2005).

    Ranks beyond a power of two hand over their vector first and get the sum last: two whole messages more.
    """
    power = 2 ** int(math.log2(ranks))
    beyond = 2 * (link.latency_s + size_bytes / link.bytes_per_s) if power < ranks else 0.0
    return 2 * math.log2(power) * link.latency_s + 2 * (power - 1) / power * size_bytes / link.bytes_per_s + beyond


Flat = Callable[[int, float, Link], float]


def flat_s(cost: Flat, ranks: int, size_bytes: float, fleet: Fleet) -> float:
    """All ranks alike: the slower of the two links sets the pace as soon as there are two nodes."""
    if ranks <= fleet.per_node:
        return cost(ranks, size_bytes, fleet.inside)
    return max(cost(ranks, size_bytes, link) for link in (fleet.inside, fleet.between))


def hierarchical_ring_s(ranks: int, size_bytes: float, fleet: Fleet) -> float:
    """Rings inside nodes; between, every rank's own part of the vector goes round a ring of nodes, all parts at once."""
    local = min(ranks, fleet.per_node)
    nodes = math.ceil(ranks / fleet.per_node)
    return ring_s(local, size_bytes, fleet.inside) + ring_s(nodes, size_bytes / local, fleet.between)


def hierarchical_tree_s(ranks: int, size_bytes: float, fleet: Fleet) -> float:
    """Trees inside nodes; between, one rank of each node takes the whole vector up and down a tree of nodes."""
    nodes = math.ceil(ranks / fleet.per_node)
    return tree_s(min(ranks, fleet.per_node), size_bytes, fleet.inside) + tree_s(nodes, size_bytes, fleet.between)


ALGORITHMS: Mapping[str, Callable[[int, float, Fleet], float]] = {
    "ring": lambda *at: flat_s(ring_s, *at),
    "tree": lambda *at: flat_s(tree_s, *at),
    "halving-doubling": lambda *at: flat_s(halving_doubling_s, *at),
    "hierarchical ring": hierarchical_ring_s,
    "hierarchical tree": hierarchical_tree_s,
}


def comm_s(algorithm: str, ranks: int, buckets: Sequence[float], fleet: Fleet) -> float:
    """Seconds of one step's allreduces, one after the other; `buckets` in bytes."""
    return sum(ALGORITHMS[algorithm](ranks, size, fleet) for size in buckets) if ranks > 1 else 0.0


def step_s(model: StepModel, samples: float, comm: float, crowd: float = 1.0) -> float:
    """Seconds of one step. No more communication is hidden than backward is long; none is one rank alone."""
    compute = crowd * model.compute_s(samples, alone=not comm)
    return compute + max(model.exposed * comm, comm - BACKWARD * compute)


def fit_link(points: Sequence[tuple[float, float]], ranks: int, name: str = "measured") -> Link:
    """Latency and bandwidth from (bytes, seconds) of allreduces, as if all were rings: the least sum of squared relative errors."""
    rows = np.array([[2 * (ranks - 1), 2 * (ranks - 1) / ranks * size] for size, _ in points])
    latency, beta = _least(rows, np.array([seconds for _, seconds in points]))
    return Link(name, latency, 1 / beta if beta else math.inf)


def fit_step(points: Sequence[Measured]) -> StepModel:
    """Least sums of squared relative errors: computing from ranks alone, then what is shared and exposed from all others.

    What the points cannot tell apart: no fixed_s where samples are all alike; nothing shared where nobody was alone; all communication
    exposed where there was none. What ranks wait for beyond all communication is not the link's: it is shared.
    """
    alone, others = [p for p in points if not p.comm_s], [p for p in points if p.comm_s]
    varied = len({p.samples for p in alone or others}) > 1
    rows = np.array([[p.crowd * varied, p.crowd * p.samples, p.comm_s] for p in alone or others])
    fixed, per_sample, exposed = _least(rows, np.array([p.step_s for p in alone or others]))
    if not alone or not others:
        return StepModel(fixed, per_sample, 0.0, exposed if others else 1.0)
    rows = np.array([[p.crowd * (fixed + per_sample * p.samples), p.comm_s] for p in others])
    seconds = np.array([p.step_s for p in others])
    factor, exposed = _least(rows, seconds)
    if exposed > 1:
        factor, exposed = *_least(rows[:, :1], seconds, rows[:, 1]), 1.0
    return StepModel(fixed, per_sample, factor - 1, exposed)


def _least(rows: np.ndarray, seconds: np.ndarray, known: np.ndarray | float = 0.0) -> list[float]:
    """Factors of the columns that, with what is known, make the seconds; none negative: one that would be is left out."""
    kept = [column for column in range(rows.shape[1]) if rows[:, column].any()]
    while kept:
        scaled = rows[:, kept] / seconds[:, None]
        unit = np.linalg.norm(scaled, axis=0)  # bytes and messages lie nine powers of ten apart
        found = np.linalg.lstsq(scaled / unit, (seconds - known) / seconds, rcond=None)[0] / unit
        if (found * unit).min() >= 0:
            return [float(found[kept.index(column)]) if column in kept else 0.0 for column in range(rows.shape[1])]
        kept.pop(int((found * unit).argmin()))
    return [0.0] * rows.shape[1]


def link_errors(points: Sequence[tuple[float, float]], ranks: int) -> list[float]:
    """Relative error of each allreduce, predicted from all others."""
    errors = []
    for place, (size, seconds) in enumerate(points):
        link = fit_link([*points[:place], *points[place + 1 :]], ranks)
        errors.append(ring_s(ranks, size, link) / seconds - 1)
    return errors


def step_errors(points: Sequence[Measured]) -> list[float]:
    """Relative error of each step, predicted from all others; none where too few are left to fit four numbers."""
    if len(points) < 5:
        return []
    errors = []
    for place, point in enumerate(points):
        model = fit_step([*points[:place], *points[place + 1 :]])
        errors.append(step_s(model, point.samples, point.comm_s, point.crowd) / point.step_s - 1)
    return errors


def cut(total_bytes: int, bucket_bytes: float) -> list[float]:
    """Bytes of each bucket."""
    whole, rest = divmod(total_bytes, bucket_bytes)
    return [float(bucket_bytes)] * int(whole) + ([float(rest)] if rest else [])


def read_links(text: str) -> tuple[Link, Link]:
    """ "nvlink:5us:300GB/s,ib:2us:25GB/s" -> inside a node, between nodes; one link is both."""
    links = []
    for part in text.split(","):
        match = _LINK.fullmatch(part.strip())
        if not match or not float(match[4]):
            fix = "NAME:LATENCY:BANDWIDTH, inside a node and between nodes: --links nvlink:5us:300GB/s,ib:2us:25GB/s"
            raise UserError(f"cannot read the link {part!r}", "--links", fix)
        links.append(Link(match[1], float(match[2]) * _SECONDS[match[3]], float(match[4]) * _UNITS[match[5]]))
    if len(links) > 2:
        raise UserError(f"{len(links)} links, at most two are known: inside a node, between nodes", "--links", "leave the others out")
    return links[0], links[-1]
