"""Starts the simulated GPUs of a process that runs jobs: a function for on_ranks.py, which has not
imported torch."""

from __future__ import annotations

from simulated_gpu.load import start


def main(out: str, words: dict[str, list[str]], engines: dict[str, list[str]]) -> None:
    gpu = start(2)
    from simulated_gpu import jobs  # imports torch

    jobs.main(gpu, out, words, engines)
