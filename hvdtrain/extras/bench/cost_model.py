"""Predicts the time of a step on more ranks: an alpha-beta model of allreduce and a model of a
step, fitted to measurements.

alpha is the latency of a message, beta the seconds of a byte (Hockney 1994).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from hvdtrain.errors import UserError
from hvdtrain.extras.plan.meshes.link import (
    BACKWARD,
    Link,
    MeasuredAllreduce,
    fit_link,
    least_squares,
)

_PREFIXES = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_SECONDS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
_LINK = re.compile(
    r"([\w.-]+):(\d+(?:\.\d+)?(?:e-?\d+)?)(ns|us|ms|s):(\d+(?:\.\d+)?)([KMGT]?)B/s", re.ASCII
)


class Cluster(NamedTuple):
    """The links of a cluster; ranks fill its nodes one after the other."""

    inside: Link  # between ranks of one node
    between: Link  # between nodes
    per_node: int  # ranks


class MeasuredStep(NamedTuple):
    """A step of a job that ran."""

    samples: float  # samples of one rank
    oversubscription: float  # ranks / cores, at least 1: computing takes this many times as long
    comm_s: float  # communication of all gradients without overlap; 0 on one rank
    step_s: float


class StepModel(NamedTuple):
    """Seconds of a step: oversubscription x (fixed + per_sample x samples) x (1 + contention) +
    exposed communication."""

    fixed_s: float
    per_sample_s: float
    # with two or more ranks, computation takes 1 + this times as long (memory, caches, readers, the
    # slowest rank)
    contention: float
    exposed: float  # share of the communication that computing does not hide, 0 to 1

    def compute_s(self, samples: float, alone: bool = False) -> float:
        """Returns the seconds of computation. alone: a single rank without others on the
        machine."""
        seconds = self.fixed_s + self.per_sample_s * samples
        return seconds if alone else seconds * (1 + self.contention)


def ring_s(ranks: int, size_bytes: float, link: Link) -> float:
    """Returns the seconds of a ring allreduce: 2 (n - 1) messages of B / n."""
    return 2 * (ranks - 1) * (link.latency_s + size_bytes / ranks / link.bytes_per_s)


def tree_s(ranks: int, size_bytes: float, link: Link) -> float:
    """Returns the seconds of a binomial tree, up and down, with the whole vector in each
    message."""
    return 2 * math.ceil(math.log2(ranks)) * (link.latency_s + size_bytes / link.bytes_per_s)


def halving_doubling_s(ranks: int, size_bytes: float, link: Link) -> float:
    """Returns the seconds of recursive halving and doubling (Thakur, Rabenseifner, Gropp 2005,
    section 3.3).

    Ranks beyond a power of two send their vector first and receive the sum last: two more messages
    of the whole vector.
    """
    power = 2 ** int(math.log2(ranks))
    beyond_s = 2 * (link.latency_s + size_bytes / link.bytes_per_s) if power < ranks else 0.0
    latency_s = 2 * math.log2(power) * link.latency_s
    transfer_s = 2 * (power - 1) / power * size_bytes / link.bytes_per_s
    return latency_s + transfer_s + beyond_s


def flat_s(
    cost: Callable[[int, float, Link], float], ranks: int, size_bytes: float, cluster: Cluster
) -> float:
    """Returns seconds of an algorithm that ignores nodes: on several nodes the slower link
    determines its time."""
    if ranks <= cluster.per_node:
        return cost(ranks, size_bytes, cluster.inside)
    return max(cost(ranks, size_bytes, link) for link in (cluster.inside, cluster.between))


def hierarchical_ring_s(ranks: int, size_bytes: float, cluster: Cluster) -> float:
    """Returns the seconds of rings within nodes, and a ring between nodes for each rank's share of
    the vector, all at the same time."""
    local_ranks = min(ranks, cluster.per_node)
    nodes = math.ceil(ranks / cluster.per_node)
    return ring_s(local_ranks, size_bytes, cluster.inside) + ring_s(
        nodes, size_bytes / local_ranks, cluster.between
    )


def hierarchical_tree_s(ranks: int, size_bytes: float, cluster: Cluster) -> float:
    """Returns the seconds of trees within nodes, and a tree between nodes with one rank of each
    node and the whole vector."""
    local_ranks = min(ranks, cluster.per_node)
    nodes = math.ceil(ranks / cluster.per_node)
    return tree_s(local_ranks, size_bytes, cluster.inside) + tree_s(
        nodes, size_bytes, cluster.between
    )


def _flat_ring_s(ranks: int, size_bytes: float, cluster: Cluster) -> float:
    return flat_s(ring_s, ranks, size_bytes, cluster)


def _flat_tree_s(ranks: int, size_bytes: float, cluster: Cluster) -> float:
    return flat_s(tree_s, ranks, size_bytes, cluster)


def _flat_halving_doubling_s(ranks: int, size_bytes: float, cluster: Cluster) -> float:
    return flat_s(halving_doubling_s, ranks, size_bytes, cluster)


ALGORITHMS: Mapping[str, Callable[[int, float, Cluster], float]] = {
    "ring": _flat_ring_s,
    "tree": _flat_tree_s,
    "halving-doubling": _flat_halving_doubling_s,
    "hierarchical ring": hierarchical_ring_s,
    "hierarchical tree": hierarchical_tree_s,
}


def comm_s(algorithm: str, ranks: int, bucket_bytes: Sequence[float], cluster: Cluster) -> float:
    """Returns seconds of one step's allreduces, one bucket after the other."""
    if ranks == 1:
        return 0.0
    return sum(ALGORITHMS[algorithm](ranks, size, cluster) for size in bucket_bytes)


def step_s(model: StepModel, samples: float, comm: float, oversubscription: float = 1.0) -> float:
    """Returns the seconds of a step with `comm` seconds of communication, 0 for a single rank. The
    backward pass hides at most its own duration."""
    compute = oversubscription * model.compute_s(samples, alone=not comm)
    return compute + max(model.exposed * comm, comm - BACKWARD * compute)


def fit_step(points: Sequence[MeasuredStep]) -> StepModel:
    """Fits the model by least squares of relative errors: computing from single ranks, then
    contention and exposed communication from the others.

    If the points cannot separate parameters: fixed_s is 0 if all have the same number of samples;
    contention is 0 if no rank ran alone; exposed is 1 if there was no communication. Time beyond
    all communication counts as contention, not as the link's.
    """
    alone = [point for point in points if not point.comm_s]
    together = [point for point in points if point.comm_s]
    fixed_s, per_sample_s, exposed = _fit_compute(alone or together)
    if not together:
        return StepModel(fixed_s, per_sample_s, contention=0.0, exposed=1.0)
    if not alone:
        return StepModel(fixed_s, per_sample_s, contention=0.0, exposed=exposed)
    compute = np.array(
        [point.oversubscription * (fixed_s + per_sample_s * point.samples) for point in together]
    )
    communication = np.array([point.comm_s for point in together])
    seconds = np.array([point.step_s for point in together])
    slowdown, exposed = least_squares(np.stack([compute, communication], axis=1), seconds)
    if exposed > 1:
        (slowdown,) = least_squares(compute[:, None], seconds, known=communication)
        exposed = 1.0
    return StepModel(fixed_s, per_sample_s, contention=slowdown - 1, exposed=exposed)


def _fit_compute(points: Sequence[MeasuredStep]) -> list[float]:
    """Returns [fixed_s, per_sample_s, exposed]."""
    samples_vary = len({point.samples for point in points}) > 1
    rows = [
        [
            point.oversubscription * samples_vary,
            point.oversubscription * point.samples,
            point.comm_s,
        ]
        for point in points
    ]
    return least_squares(np.array(rows), np.array([point.step_s for point in points]))


def link_errors(points: Sequence[MeasuredAllreduce], ranks: int) -> list[float]:
    """Returns the relative error of each allreduce's prediction from all others."""
    errors = []
    for index, point in enumerate(points):
        link = fit_link([*points[:index], *points[index + 1 :]], ranks)
        errors.append(ring_s(ranks, point.size_bytes, link) / point.seconds - 1)
    return errors


def step_errors(points: Sequence[MeasuredStep]) -> list[float]:
    """Returns the relative error of each step's prediction from all others. Empty if fewer than
    four others remain, because there are four parameters."""
    if len(points) < 5:
        return []
    errors = []
    for index, point in enumerate(points):
        model = fit_step([*points[:index], *points[index + 1 :]])
        errors.append(
            step_s(model, point.samples, point.comm_s, point.oversubscription) / point.step_s - 1
        )
    return errors


def split_buckets(total_bytes: int, bucket_bytes: float) -> list[float]:
    """Returns bytes of each bucket."""
    full_buckets, rest = divmod(total_bytes, bucket_bytes)
    return [float(bucket_bytes)] * int(full_buckets) + ([float(rest)] if rest else [])


def read_links(text: str) -> tuple[Link, Link]:
    """Parses "nvlink:5us:300GB/s,ib:2us:25GB/s" to the links within a node and between nodes; a
    single link is used for both. Raises UserError."""
    links = []
    for item in text.split(","):
        match = _LINK.fullmatch(item.strip())
        if not match or not float(match[4]):
            fix = (
                "NAME:LATENCY:BANDWIDTH, inside a node and between nodes: --links "
                "nvlink:5us:300GB/s,ib:2us:25GB/s"
            )
            raise UserError(f"cannot read the link {item!r}", "--links", fix)
        links.append(
            Link(
                match[1],
                float(match[2]) * _SECONDS[match[3]],
                float(match[4]) * _PREFIXES[match[5]],
            )
        )
    if len(links) > 2:
        raise UserError(
            f"{len(links)} links, at most two are possible: inside a node, between nodes",
            "--links",
            "leave the others out",
        )
    return links[0], links[-1]
