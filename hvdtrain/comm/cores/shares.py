"""Divides a host's cores among its ranks, as a pure function of the cores that they may use."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, pairwise
from typing import Literal, NamedTuple, get_args

from hvdtrain.comm.cores.topology import Topology, number_ranges

Bind = Literal["none", "numa", "gpu"]
BINDS: tuple[Bind, ...] = get_args(Bind)
KEPT = "the launcher bound each rank to cores of its own, and they keep these"


class Usable(NamedTuple):
    """The cores that one rank may use."""

    cores: tuple[int, ...]  # from the affinity mask set by its launcher or a cgroup
    # cores next to its GPU; empty without a GPU, and with comm.bind=numa
    near: tuple[int, ...] = ()
    why_not_near: str = ""  # with comm.bind=gpu, why `near` is empty


class Share(NamedTuple):
    """The cores that a rank takes."""

    cores: tuple[int, ...]
    note: str = ""  # what differs from comm.bind, and why; empty if nothing does
    is_bound: bool = True  # the rank has these cores for itself


def divide(ranks: Sequence[Usable], host: Topology) -> list[Share]:
    """Returns the share of each rank of one host, in rank order.

    No rank gets a core outside of its mask. Ranks with disjoint masks keep them. Ranks with a
    common mask divide it: first, ranks with a GPU get cores next to it, then the other ranks get
    the remaining cores. A physical core is only divided if there are fewer cores than ranks.
    """
    masks = [frozenset(rank.cores) for rank in ranks]
    if len(ranks) > 1 and not any(one & other for one, other in combinations(masks, 2)):
        return [Share(rank.cores, _kept(rank)) for rank in ranks]
    shares: dict[int, Share] = {}
    for mask in dict.fromkeys(masks):
        group = [number for number, other in enumerate(masks) if other == mask]
        overlapping = next((other for other in masks if other != mask and other & mask), None)
        if overlapping is not None:
            note = (
                f"not bound: the launcher gave ranks cores that overlap, {number_ranges(mask)} and "
                f"{number_ranges(overlapping)}"
            )
            shares |= {number: Share(ranks[number].cores, note, is_bound=False) for number in group}
        else:
            members = [ranks[number] for number in group]
            shares |= dict(zip(group, _divide_mask(mask, members, host), strict=True))
    return [shares[number] for number in range(len(ranks))]


def _kept(rank: Usable) -> str:
    if rank.near and not {*rank.near} & {*rank.cores}:
        return (
            f"{KEPT}, but {number_ranges(rank.cores)} are not next to its GPU, which is at "
            f"{number_ranges(rank.near)}"
        )
    return KEPT


def _divide_mask(mask: frozenset[int], ranks: Sequence[Usable], host: Topology) -> list[Share]:
    """Divides a mask among the ranks that have it."""
    zones = [mask.intersection(rank.near) or mask for rank in ranks]
    notes = [_note(rank, mask) for rank in ranks]
    shares: dict[int, Share] = {}
    taken: set[int] = set()
    for zone in sorted({*zones}, key=lambda zone: (len(zone), sorted(zone))):
        group = [number for number, other in enumerate(zones) if other == zone]
        parts = split_cores(zone - taken, len(group), host)
        if not parts:
            return _divide_evenly(mask, notes, host)
        for number, part in zip(group, parts, strict=True):
            shares[number] = Share(part, notes[number])
        taken |= zone
    return [shares[number] for number in range(len(ranks))]


def _note(rank: Usable, mask: frozenset[int]) -> str:
    if rank.near and not mask.intersection(rank.near):
        return (
            f"the cores next to its GPU ({number_ranges(rank.near)}) are not among those that it "
            f"may use; it has a share of {number_ranges(mask)}"
        )
    if rank.why_not_near:
        return f"{rank.why_not_near}; it has a share of {number_ranges(mask)}"
    return ""


def _divide_evenly(mask: frozenset[int], notes: Sequence[str], host: Topology) -> list[Share]:
    """Divides a mask without regard to GPUs: too few cores are next to some."""
    parts = split_cores(mask, len(notes), host)
    if not parts:
        cores = f"{len(mask)} core{'s' if len(mask) > 1 else ''}"
        what = f"not bound: {len(notes)} ranks share {cores}"
        return [Share(tuple(sorted(mask)), what, is_bound=False)] * len(notes)
    shared = f"too few cores are next to a GPU; it has a share of {number_ranges(mask)}"
    return [Share(part, note or shared) for part, note in zip(parts, notes, strict=True)]


def split_cores(cores: frozenset[int], parts: int, host: Topology) -> list[tuple[int, ...]]:
    """Splits cores into consecutive parts whose sizes differ by at most one physical core; splits
    hardware threads if there are fewer cores than parts.

    No part is empty: without enough threads, returns an empty list.
    """
    physical = host.physical(cores)
    units = physical if len(physical) >= parts else [(core,) for unit in physical for core in unit]
    if len(units) < parts:
        return []
    bounds = [part * len(units) // parts for part in range(parts + 1)]
    return [
        tuple(sorted(core for unit in units[first:end] for core in unit))
        for first, end in pairwise(bounds)
    ]
