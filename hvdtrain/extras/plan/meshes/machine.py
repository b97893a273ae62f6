"""Machine: the speed of ranks and links, from options of `plan --parallel` or measurements of
`bench`."""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hvdtrain.errors import UserError
from hvdtrain.extras.plan.meshes.link import IN_PARTS, Link, fit_link, link_points
from hvdtrain.frameworks.footprint import PlannedWork

INSIDE = Link("inside", 5e-6, 10e9)  # ranks of one host
BETWEEN = Link("between", 30e-6, 1.25e9)  # 10 Gbit/s Ethernet
RANKS_PER_NODE = 8
LARGE = 2**20  # bytes that take longer than an empty message
# operations of products in the time in which other operations read or write a byte: A100 10, H100
# 20, a CPU core 5
FLOPS_PER_BYTE = 10.0
# times the bytes of the weights, that an update reads and writes: Adam's weights, gradients and
# state
UPDATE_TOUCHES = 8.0
_SECONDS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
_PREFIXES = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_LINK = re.compile(r"(\d+(?:\.\d+)?)([KMGT]?)B/s(?:,(\d+(?:\.\d+)?)(ns|us|ms|s))?", re.ASCII)
_SIZE = 768  # size of the measured product
_PRODUCTS = 7


class Machine(NamedTuple):
    """Speed and links of each rank while all ranks work; nodes are filled with ranks one after the
    other."""

    flops_per_s: float  # operations of matrix products, convolutions and attention
    touched_bytes_per_s: float  # bytes that other operations read and write
    updated_bytes_per_s: float  # bytes of weights that an optimizer updates
    inside: Link  # between two ranks of a node
    between: Link  # link between nodes, shared by the ranks of a node
    per_node: int  # ranks
    # times the seconds of a ring, a reduction of each rank's part to it or the opposite on more
    # than two ranks
    in_parts: float
    assumed: tuple[str, ...]  # for people: the sources of these numbers


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--parallel", action="store_true")
    parser.add_argument("--gflops", type=_read_gflops)
    parser.add_argument("--inside", type=lambda text: read_link(text, "--inside", INSIDE))
    parser.add_argument("--between", type=lambda text: read_link(text, "--between", BETWEEN))
    parser.add_argument("--ranks-per-node", type=_read_ranks)
    parser.add_argument("--measured")


def read_link(text: str, option: str, default: Link) -> Link:
    """Parses "1.25GB/s,30us"; the latency defaults to that of `default`. Raises UserError."""
    found = _LINK.fullmatch(text.strip())
    if not found or not float(found[1]):
        raise UserError(
            f"cannot read the link {text!r}",
            option,
            f"give the bandwidth and latency of a message, as in {option} 1.25GB/s,30us",
        )
    latency_s = float(found[3]) * _SECONDS[found[4]] if found[3] else default.latency_s
    return Link(default.name, latency_s, float(found[1]) * _PREFIXES[found[2]])


def machine_of(
    options: argparse.Namespace, ranks: int, weight_bytes: int, plain: PlannedWork
) -> Machine:
    """Returns the machine's speeds: from the options, or else from measurements, or else from
    assumptions.

    weight_bytes: size of the whole model. plain: work of a step with a replicated model, which a
    measured step is compared with. Raises UserError for a file that is not a result of bench.
    """
    per_node = min(ranks, options.ranks_per_node or RANKS_PER_NODE)
    measured = _Measured(weight_bytes, plain)
    for path in options.measured.split(",") if options.measured else []:
        measured.read(path)
    inside = options.inside or measured.links.get("inside")
    between = options.between or measured.links.get("between")
    assumed = [*measured.notes]
    flops = measured.flops_per_s
    touched = measured.touched_bytes_per_s
    updated = measured.updated_bytes_per_s
    if options.gflops:
        flops = 1e9 * options.gflops
        touched = 0.0
        updated = 0.0
        assumed.append(f"a rank computes {options.gflops:g} GFLOP/s (--gflops)")
    elif not flops:
        product = _product_flops()
        flops = product / per_node
        assumed.append(
            f"a rank computes {flops / 1e9:.3g} GFLOP/s: a matrix product's {product / 1e9:.3g} "
            f"on this host, divided by {per_node} ranks; "
            "--gflops or --measured says better"
        )
    if not touched:
        touched = flops / FLOPS_PER_BYTE
        assumed.append(
            f"other operations read and write {touched / 1e9:.3g} GB/s ({FLOPS_PER_BYTE:g} "
            "operations in the time of a byte)"
        )
    if not updated:
        updated = touched / UPDATE_TOUCHES
        assumed.append(
            f"the optimizer updates {updated / 1e9:.3g} GB of weights a second "
            f"({UPDATE_TOUCHES:g} bytes touched for each)"
        )
    for found, default, option in ((inside, INSIDE, "--inside"), (between, BETWEEN, "--between")):
        if found is None and (option == "--inside" or per_node < ranks):
            assumed.append(f"{_link_words(default)} {option[2:]} nodes ({option} says better)")
    if per_node < ranks:
        assumed.append(
            f"{per_node} ranks on a node, which share its link to others"
            if per_node > 1
            else "1 rank on a node"
        )
    return Machine(
        flops,
        touched,
        updated,
        inside or INSIDE,
        between or BETWEEN,
        per_node,
        measured.in_parts,
        tuple(assumed),
    )


class _Measured:
    """The measurements in files of bench."""

    def __init__(self, weight_bytes: int, plain: PlannedWork) -> None:
        self._weight_bytes = weight_bytes
        self._plain = plain
        self.links = dict[str, Link]()
        self.notes = list[str]()
        self.flops_per_s = self.touched_bytes_per_s = self.updated_bytes_per_s = 0.0
        self.in_parts = 1.0

    def read(self, path: str) -> None:
        """Raises UserError."""
        fix = "the JSON of hvdtrain bench step --json FILE, or of bench allreduce"
        try:
            found = json.loads(Path(path).read_text(encoding="utf-8"))
            if "phases_ms" in found:
                self._read_step(found, path)
            else:
                self._read_allreduce(found, path)
            speeds = [self.in_parts, *(link.bytes_per_s for link in self.links.values())]
            speeds += (
                [self.flops_per_s, self.touched_bytes_per_s, self.updated_bytes_per_s]
                if "phases_ms" in found
                else []
            )
            if not all(0 < speed < math.inf for speed in speeds):
                raise ValueError(speeds)
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}", "--measured", fix) from None
        except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError):
            raise UserError(
                f"{path} is not a result of bench step, or of bench allreduce on 2 ranks or more",
                "--measured",
                fix,
            ) from None

    def _read_step(self, found: Mapping[str, Any], path: str) -> None:
        """Reads a result of bench step. Time of forward and backward beyond matrix products is
        assigned to other operations."""
        phases = found["phases_ms"]
        flops = 1e9 * found["gflop_per_step_of_a_rank"]
        passes_s = (phases["forward"] + phases["backward"]) / 1e3
        product = 1e9 * found["matmul_gflop_per_s"]
        others_s = max(passes_s - flops / product, passes_s / 10)
        self.flops_per_s = flops / (passes_s - others_s)
        self.touched_bytes_per_s = self._plain.touched_bytes * flops / self._plain.flops / others_s
        self.updated_bytes_per_s = self._weight_bytes / (phases["update"] / 1e3)
        self.notes.append(
            f"a rank computes {self.flops_per_s / 1e9:.3g} GFLOP/s, reads and writes "
            f"{self.touched_bytes_per_s / 1e9:.3g} GB/s in other "
            f"operations, and updates {self.updated_bytes_per_s / 1e9:.3g} GB of weights a second "
            f"({path}, {found['ranks']} ranks)"
        )

    def _read_allreduce(self, found: Mapping[str, Any], path: str) -> None:
        where = "between" if len(found["hosts"]) > 1 else "inside"
        link = fit_link(link_points(found), found["ranks"], where)
        self.links[where] = link
        self.notes.append(f"{_link_words(link)} {where} nodes ({path}, {found['ranks']} ranks)")
        medians = {(row["method"], row["bytes"]): row["quartiles_s"][1] for row in found["rows"]}
        ratios = [
            seconds / medians["allreduce", size]
            for (method, size), seconds in medians.items()
            if method == IN_PARTS and size >= LARGE
        ]
        if ratios and found["ranks"] > 2:
            self.in_parts = statistics.median(ratios)
            self.notes.append(
                f"a reduce-scatter and an all-gather take {self.in_parts:.2g} times the seconds "
                f"of an allreduce ({path})"
            )


def _link_words(link: Link) -> str:
    return f"{link.bytes_per_s / 1e9:.3g} GB/s and {1e6 * link.latency_s:.3g} us"


def _product_flops() -> float:
    """Operations per second of a matrix product on all cores that this process may use: the
    median."""
    a, b = (
        np.random.default_rng(seed).standard_normal((_SIZE, _SIZE), np.float32) for seed in (0, 1)
    )
    seconds = []
    for _ in range(_PRODUCTS + 2):
        start = time.perf_counter()
        a @ b
        seconds.append(time.perf_counter() - start)
    return float(2 * _SIZE**3 / sorted(seconds[2:])[_PRODUCTS // 2])


def _read_gflops(text: str) -> float:
    try:
        gflops = float(text)
    except ValueError:
        gflops = 0.0
    if not 0 < gflops < float("inf"):
        raise UserError(
            f"{text} is not a speed",
            "--gflops",
            "give 10^9 floating-point operations per second of one rank, as in --gflops 50",
        )
    return gflops


def _read_ranks(text: str) -> int:
    if not (text.isdecimal() and int(text)):
        raise UserError(f"{text} is not a number of ranks", "--ranks-per-node", "1 or more")
    return int(text)
