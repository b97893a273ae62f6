"""Checks of the simulated GPU itself: {check: result}, in a process with two of them."""

from __future__ import annotations

from typing import Any

import torch

from simulated_gpu.load import Gpu


def found(gpu: Gpu) -> dict[str, Any]:
    """The results of all checks. Leaves no work in a stream."""
    results = {
        check.__name__: check()
        for check in (
            mixed_with_the_host,
            mixed_with_another_gpu,
            fresh_memory,
            copy_on_a_side_stream,
            freed_too_early,
            kept_by_record_stream,
            copy_to_the_host,
            generator,
        )
    }
    gpu.recorder.clear()
    results["waits"] = waits(gpu)
    results["races"] = races(gpu)
    torch.cuda.synchronize()
    gpu.recorder.clear()
    return results


def mixed_with_the_host() -> str:
    return _error(lambda: torch.ones(2, 3, device="cuda") @ torch.ones(3, 2))


def mixed_with_another_gpu() -> str:
    return _error(lambda: torch.ones(2, device="cuda:0") + torch.ones(2, device="cuda:1"))


def fresh_memory() -> list[str]:
    return _texts(torch.empty(2, device="cuda"))


def copy_on_a_side_stream() -> list[list[str]]:
    """Returns the values before and after a wait."""
    side = torch.cuda.Stream()
    host = torch.tensor([1.0, 2.0]).pin_memory()
    with torch.cuda.stream(side):
        copy = host.to("cuda", non_blocking=True)
        copy.mul_(3)
    before = _texts(copy)
    torch.cuda.current_stream().wait_stream(side)
    return [before, _texts(copy)]


def freed_too_early() -> list[str]:
    return _doubled(is_kept=False)


def kept_by_record_stream() -> list[str]:
    return _doubled(is_kept=True)


def _doubled(*, is_kept: bool) -> list[str]:
    """Numbers that a side stream doubles after Python has let go of them."""
    side = torch.cuda.Stream()
    numbers = torch.ones(2, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        doubled = numbers * 2
    if is_kept:
        numbers.record_stream(side)
    del numbers
    torch.cuda.current_stream().wait_stream(side)
    return _texts(doubled)


def copy_to_the_host() -> list[list[str]]:
    """Into page-locked memory: before and after the host waits."""
    host = torch.empty(2, pin_memory=True)
    host.copy_(torch.ones(2, device="cuda"), non_blocking=True)
    before = [str(float(number)) for number in host]
    torch.cuda.current_stream().synchronize()
    return [before, [str(float(number)) for number in host]]


def generator() -> bool:
    """Whether the GPU has its own random generator."""
    torch.manual_seed(1)
    torch.cuda.manual_seed(2)
    first = _texts(torch.rand(2, device="cuda"))
    torch.rand(5)
    torch.cuda.manual_seed(2)
    return first == _texts(torch.rand(2, device="cuda"))


def waits(gpu: Gpu) -> dict[str, int]:
    """What the host waits for here."""
    numbers = torch.ones(3, device="cuda")
    host = torch.ones(3)
    with gpu.recorder.watching():
        numbers.sum().item()
        numbers[numbers > 0].add_(1)
        numbers.cpu()
        host.cuda()
        host.pin_memory().to("cuda", non_blocking=True)
        numbers.add_(1).mul_(2.0)
    return {wait.what: count for wait, count in gpu.recorder.waits.items()}


def races(gpu: Gpu) -> list[list[str]]:
    """What is reported of a side stream that does not wait, and of one that does."""
    side = torch.cuda.Stream()
    reports = []
    for waits_for_it in (False, True):
        gpu.recorder.clear()
        numbers = torch.ones(4, device="cuda")
        if waits_for_it:
            side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            numbers.add_(1)
        torch.cuda.current_stream().wait_stream(side)
        numbers.mul_(2)
        reports.append([race.partition("MainThread: ")[2] for race in gpu.recorder.races])
    return reports


def _texts(numbers: torch.Tensor) -> list[str]:
    """Read now, whatever streams have not done yet."""
    view = torch.ops.simulated_gpu.host_view(numbers)
    return [str(float(number)) for number in view]


def _error(call: Any) -> str:
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return ""
