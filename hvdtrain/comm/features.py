"""Features: what an engine can do beyond the collectives that all engines have. Code asks for a feature, never for an engine's name."""

from __future__ import annotations

import ast
from functools import cache
from typing import Literal

from hvdtrain.config import plugins

Feature = Literal[
    "several_ranks", "device_memory", "nccl", "asynchronous", "bfloat16_sums", "adasum", "horovod_api", "ddp", "plain_mpi", "p2p", "shrink"
]  # fmt: skip

MEANINGS: dict[Feature, str] = {
    "several_ranks": "connects two processes or more",
    "device_memory": "takes tensors in GPU memory; without it they are copied to host memory for each collective. mpi has it where a rank "
    "computes on a GPU",
    "nccl": "reduces tensors in GPU memory by NCCL, which refuses two ranks on one GPU",
    "asynchronous": "start_allreduce() returns at once, and the sum is computed while the caller goes on; without it the caller waits",
    "bfloat16_sums": "allreduce and start_reduce_scatter sum bfloat16",
    "adasum": "allreduce has op=adasum",
    "horovod_api": "Horovod runs: hvd.DistributedOptimizer, hvd.grouped_allreduce, and the settings comm.cycle_ms, fusion_mb, hierarchical",
    "ddp": "torch.distributed runs with these ranks, so that DistributedDataParallel does",
    "plain_mpi": "its collectives are those of mpi4py, on numpy arrays",
    "p2p": "one rank sends to another one: start_send() and start_recv()",
    "shrink": "living ranks go on without those that are lost: be_ready_to_shrink() and shrink()",
}


@cache
def features_of(engine: str) -> frozenset[Feature]:
    """The features that comm.engine=`engine` has on every machine: FEATURES of its file, read without importing torch or MPI.

    A connected engine may have more (Communicator.features). Raises UserError where there is no such engine.
    """
    tree = ast.parse(plugins.find("comm", engine, "comm.engine").read_text())
    assigned = {node.target.id: node.value for node in tree.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)}
    value = assigned["FEATURES"]
    assert value is not None, engine
    return frozenset(ast.literal_eval(value))
