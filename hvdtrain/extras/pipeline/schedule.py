"""The order of passes on each rank of a pipeline, and its waiting times, by a simulation with the
time of each pass.

A free rank makes the next forward pass, unless it already holds the activations of as many
micro-batches as the schedule allows. Otherwise it makes the next backward pass, or, if it would
wait, a postponed gradient of weights. An order with which the simulation ends does not deadlock,
for any number of micro-batches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

Schedule = Literal["gpipe", "1f1b", "interleaved", "zero_bubble"]
Kind = Literal["forward", "backward", "input gradient", "weight gradient"]


class Action(NamedTuple):
    """One pass of one micro-batch through one stage. "backward" is both gradients at once."""

    kind: Kind
    stage: int  # stage s is on rank s % ranks
    micro: int


class Timed(NamedTuple):
    action: Action
    start: float
    stop: float


class Seconds(NamedTuple):
    """Seconds of one micro-batch in one stage; gradients of inputs and gradients of weights each
    take half of `backward`."""

    forward: float
    backward: float


class UnitCost(NamedTuple):
    """Cost of one unit of a model, for a micro-batch."""

    name: str
    operations: float  # floating-point, of the forward pass
    seconds: Seconds


UNIT = Seconds(1.0, 2.0)  # matrix products: one forward, two backward


def of_stages(units: Sequence[Seconds], cuts: Sequence[int]) -> list[Seconds]:
    """Returns the seconds of each stage from the seconds of its units; cuts[i] is the first unit of
    stage i."""
    stages = [units[start:stop] for start, stop in zip(cuts, [*cuts[1:], len(units)], strict=True)]
    return [
        Seconds(sum(unit.forward for unit in stage), sum(unit.backward for unit in stage))
        for stage in stages
    ]


class PipelineTimeline(NamedTuple):
    """The passes of each rank, in order."""

    ranks: list[list[Timed]]

    @property
    def seconds(self) -> float:
        """The time from the first pass to the end of the last one."""
        return max((timed.stop for timeline in self.ranks for timed in timeline), default=0.0)

    @property
    def bubble(self) -> float:
        """The share of that time that a rank waits, 0 to 1: the mean over ranks."""
        busy = sum(timed.stop - timed.start for timeline in self.ranks for timed in timeline)
        return 1 - busy / (self.seconds * len(self.ranks)) if self.seconds else 0.0

    def order(self, rank: int) -> list[Action]:
        return [timed.action for timed in self.ranks[rank]]


def formula(schedule: Schedule, ranks: int, micro: int, virtual: int = 1) -> float:
    """Returns the share of the time that a rank waits with equal stages, 0 to 1, by the papers in
    timeline(). `micro` must be a multiple of `ranks` for interleaved.
    """
    parts = 3 if schedule == "zero_bubble" else virtual
    return (ranks - 1) / (parts * micro + ranks - 1)


def takes_in_order(found: PipelineTimeline) -> bool:
    """Whether each rank takes the messages of another one in the order in which that one sends
    them."""
    ranks = len(found.ranks)
    orders = [found.order(rank) for rank in range(ranks)]
    last = max((action.stage for order in orders for action in order), default=0)
    sent: dict[tuple[int, int], list[Action]] = {}
    taken: dict[tuple[int, int], list[Action]] = {}
    for rank, order in enumerate(orders):
        for kind, stage, number in order:
            if kind == "weight gradient":
                continue
            step = 1 if kind == "forward" else -1  # to the next stage, or back
            message = Action("forward" if step == 1 else "backward", stage, number)
            if 0 <= stage - step <= last:
                taken.setdefault(((stage - step) % ranks, rank), []).append(message)
            if 0 <= stage + step <= last:
                link = rank, (stage + step) % ranks
                sent.setdefault(link, []).append(message._replace(stage=stage + step))
    return sent == taken


def timeline(
    schedule: Schedule,
    ranks: int,
    micro: int,
    virtual: int = 1,
    seconds: Sequence[Seconds] = (),
    *,
    backward: bool = True,
    transfers: Sequence[float] = (),
) -> PipelineTimeline:
    """Simulates the ranks, with `virtual` stages each (more than one if interleaved); without
    `backward` only forward passes.

    transfers: the seconds of a message into each stage, or of its gradient back; a link carries one
    message at a time in each direction.

    The order is computed for stages that take UNIT, so that it is the same on all ranks; the times
    use `seconds` for each stage, or UNIT. gpipe: Huang et al. 2019, arXiv:1811.06965. 1f1b:
    Narayanan et al. 2019, arXiv:1806.03377 (PipeDream), flushed at each step. interleaved:
    Narayanan et al. 2021, arXiv:2104.04473, 2.2; here for any number of micro-batches. zero_bubble:
    Qi et al. 2023, arXiv:2401.10241, ZB-H1.
    """
    assert virtual == 1 or schedule == "interleaved", (schedule, virtual)
    queues = [_Queues(schedule, rank, ranks, micro, virtual, backward) for rank in range(ranks)]
    done: dict[Action, float] = {}  # when it ends
    orders: list[list[Action]] = [[] for _ in range(ranks)]
    free_at = [0.0] * ranks
    now = 0.0
    while any(queue.has_any for queue in queues):
        for rank, queue in enumerate(queues):
            if free_at[rank] <= now and (action := queue.take(done, now)):
                free_at[rank] = done[action] = now + cost(action, UNIT)
                orders[rank].append(action)
        later = [time for time in free_at if time > now]
        assert later or not any(queue.has_any for queue in queues), (
            f"{schedule} deadlocks: {ranks} ranks, {micro} x {virtual}"
        )
        now = min(later, default=now)
    stages = ranks * virtual
    return _timed(
        schedule, orders, list(seconds) or [UNIT] * stages, list(transfers) or [0.0] * stages
    )


def _timed(
    schedule: Schedule,
    orders: Sequence[Sequence[Action]],
    seconds: Sequence[Seconds],
    transfers: Sequence[float],
) -> PipelineTimeline:
    """Computes the times: each pass begins when the previous one on its rank has ended and its
    inputs have arrived."""
    done: dict[Action, float] = {}
    arrived: dict[Action, float] = {}  # when its result is at the next stage
    free_at: dict[tuple[bool, int], float] = {}  # when a link is free, by direction and stage
    found: list[list[Timed]] = [[] for _ in orders]
    while len(done) < sum(map(len, orders)):
        for order, timed in zip(orders, found, strict=True):
            for action in order[len(timed) :]:
                needed = needs(schedule, action, len(seconds))
                if not all(each in done for each in needed):
                    break
                there = [(done if each.stage == action.stage else arrived)[each] for each in needed]
                start = max([timed[-1].stop if timed else 0.0, *there])
                done[action] = start + cost(action, seconds[action.stage])
                timed.append(Timed(action, start, done[action]))
                forward = action.kind == "forward"
                link = forward, action.stage + forward
                transfer_s = transfers[link[1]] if 0 < link[1] < len(transfers) else 0.0
                arrived[action] = max(done[action], free_at.get(link, 0.0)) + transfer_s
                if action.kind != "weight gradient":
                    free_at[link] = arrived[action]
    return PipelineTimeline(found)


def needs(schedule: Schedule, action: Action, stages: int) -> list[Action]:
    """Returns the actions that must be done before this one."""
    kind, stage, micro = action
    if kind == "forward":
        return [Action("forward", stage - 1, micro)] if stage else []
    if kind == "weight gradient":
        return [Action("input gradient", stage, micro)]
    following = (
        [Action(_backward_kind(schedule, stage + 1), stage + 1, micro)]
        if stage + 1 < stages
        else []
    )
    return [Action("forward", stage, micro), *following]


def _backward_kind(schedule: Schedule, stage: int) -> Kind:
    """Returns the kind of backward pass; the first stage needs no gradient of its inputs."""
    return "input gradient" if schedule == "zero_bubble" and stage else "backward"


class _Queues:
    """The remaining passes of a rank, in three queues. Only the first pass of a queue can be
    next."""

    def __init__(
        self, schedule: Schedule, rank: int, ranks: int, micro: int, virtual: int, backward: bool
    ) -> None:
        self._schedule = schedule
        self._stages = ranks * virtual
        # Groups of `ranks` micro-batches pass through all stages of a rank before the next group.
        turns = [
            (group, stage, number)
            for number in range(micro)
            for group in [number // ranks]
            for stage in range(virtual)
        ]
        self._forward = [
            Action("forward", stage * ranks + rank, number) for _, stage, number in sorted(turns)
        ]
        turns = (
            sorted((group, -stage, number) for group, stage, number in turns) if backward else []
        )
        self._backward = [
            Action(_backward_kind(schedule, rank - stage * ranks), rank - stage * ranks, number)
            for _, stage, number in turns
        ]
        self._weights: list[Action] = []
        self._held = 0  # micro-batches whose activations wait for backward
        self._most = micro * virtual if schedule == "gpipe" or not backward else ranks - rank
        if schedule == "interleaved" and backward:
            self._most = 2 * (ranks - rank - 1) + (virtual - 1) * ranks + 1
        # if micro-batches are not a multiple of ranks, waiting for one of the two would deadlock
        self._takes_either = schedule == "interleaved"
        # ZB-H1: the memory of 1f1b
        self._most_with_weights = (
            ranks if schedule == "zero_bubble" and backward else micro * virtual + 1
        )

    @property
    def has_any(self) -> bool:
        return bool(self._forward or self._backward or self._weights)

    def take(self, done: Mapping[Action, float], now: float) -> Action | None:
        """Returns the next pass if one is ready; `done` contains the ends of passes."""
        action = self._next(done, now)
        if action is None:
            return None
        if action.kind == "weight gradient":
            queue = self._weights
        elif action.kind == "forward":
            queue = self._forward
        else:
            queue = self._backward
        queue.remove(action)
        if action.kind == "forward":
            self._held += 1
        elif action.kind != "weight gradient":
            self._held -= 1
        if action.kind == "input gradient":
            self._weights.append(Action("weight gradient", action.stage, action.micro))
        return action

    def _next(self, done: Mapping[Action, float], now: float) -> Action | None:
        room = self._held < self._most and self._held + len(self._weights) < self._most_with_weights
        wanted = self._forward if self._forward and (room or not self._backward) else self._backward
        for queue in (wanted, self._backward) if self._takes_either else (wanted,):
            if queue and self._is_ready(queue[0], done, now):
                return queue[0]
        return self._weights[0] if self._weights else None

    def _is_ready(self, action: Action, done: Mapping[Action, float], now: float) -> bool:
        return all(
            done.get(each, now + 1) <= now for each in needs(self._schedule, action, self._stages)
        )


def cost(action: Action, seconds: Seconds) -> float:
    if action.kind == "forward":
        return seconds.forward
    return seconds.backward if action.kind == "backward" else seconds.backward / 2
