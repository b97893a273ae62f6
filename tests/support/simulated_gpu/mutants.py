"""Wrong changes that only a GPU shows; a job on simulated GPUs has to find each of them:

python tests/support/simulated_gpu/mutants.py [NAME ...]
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # tests/support

from mutants import Mutant, check_unchanged, troubles, try_out

ONE = "tests/simulated_gpu/test_simulated_jobs.py::test_a_job_of_one_process"
TWO = "tests/simulated_gpu/test_simulated_jobs.py::test_a_job_of_two_ranks"
INPUTS = "hvdtrain/frameworks/torch/inputs.py"
DEVICE = "hvdtrain/frameworks/torch/device.py"
STAGING = "hvdtrain/comm/staging.py"
BUCKETS = "hvdtrain/frameworks/torch/parallel/buckets.py"
STREAMS = "hvdtrain/horovod/engine/perform.py"
SENT = (
    "tests/simulated_gpu/test_simulated_jobs.py::test_what_the_host_sends_to_other_ranks_in_a_step"
)
BETWEEN = (
    "tests/simulated_gpu/test_simulated_jobs.py::test_the_host_sends_nothing_between_sync_points"
)

GPU_MUTANTS = (
    Mutant(
        "inputs.wait",
        INPUTS,
        "            stream.wait_event(batch.copied)\n",
        "",
        (f"{ONE}[augmentation]",),
    ),
    Mutant(
        "inputs.record_stream",
        INPUTS,
        "                tensor.record_stream(stream)\n",
        "                pass\n",
        (f"{ONE}[four steps without a wait]",),
    ),
    Mutant(
        "staging.filled",
        STAGING,
        "        down.wait_event(filled)\n",
        "",
        (f"{TWO}[plain-mpi]",),
    ),
    Mutant(
        "staging.copied_to_the_host",
        STAGING,
        "        self._copied.synchronize()\n",
        "",
        (f"{TWO}[plain-mpi]",),
    ),
    Mutant(
        "staging.copied_to_the_gpu",
        STAGING,
        "        self._gpus.present(result.device).wait_event(copied)\n",
        "",
        (f"{TWO}[plain-mpi]",),
    ),
    Mutant(
        "device.of_the_rank",
        DEVICE,
        "        gpus.set_device(device)\n",
        "",
        (f"{TWO}[plain-torchdist]",),
    ),
    Mutant(
        "dropout.seed",
        DEVICE,
        "        torch.get_device_module(device).manual_seed(seed)\n",
        "        pass\n",
        (f"{ONE}[dropout]",),
    ),
    Mutant(
        "gpt.positions_on_the_host",
        "hvdtrain/frameworks/torch/models/gpt.py",
        "torch.arange(first, first + tokens.shape[1], device=tokens.device)",
        "torch.arange(first, first + tokens.shape[1])",
        (f"{ONE}[language]",),
    ),
    Mutant(
        "step.reads_its_sums",
        "hvdtrain/frameworks/torch/learner.py",
        "        sums = self._counted(sums)\n",
        "        sums = {name: float(value) for name, value in self._counted(sums).items()}\n",
        (f"{ONE}[classification]",),
    ),
    Mutant(
        "buckets.wait_of_nccl",
        BUCKETS,
        "        flat = self._handle.wait()\n",
        "        flat = self._flat\n",
        (f"{TWO}[buckets-torchdist]",),
    ),
    Mutant(
        "buckets.counts_of_ranks",
        BUCKETS,
        "communicator.start_allreduce(self._flat, self.name, op)",
        "communicator.start_allreduce(self._flat[communicator.rank :], self.name, op)",
        (f"{TWO}[buckets-torchdist]",),
    ),
    Mutant(
        "step.asks_all_ranks",
        "hvdtrain/frameworks/torch/learner.py",
        "        end_step(self.orders)\n",
        "        end_step(self.orders)\n        self.data.allgather_object(0)\n",
        (f"{SENT}[plain-torchdist]",),
    ),
    Mutant(
        "loop.asks_all_ranks",
        "hvdtrain/training/loop.py",
        "        sums = add_sums(sums, of_step)\n",
        "        sums = add_sums(sums, of_step)\n        job.communicator.allgather_object(0)\n",
        (f"{BETWEEN}[four steps without a wait-torchdist]",),
    ),
    Mutant(
        "horovod.behind_the_script",
        STREAMS,
        "                streams[event.device].wait_event(event)\n",
        "                pass\n",
        (f"{TWO}[Horovod's optimizer-torchdist]",),
    ),
    Mutant(
        "horovod.before_the_script",
        STREAMS,
        "            self._gpus.present(event.device).wait_event(event)\n",
        "            pass\n",
        (f"{TWO}[Horovod's optimizer-torchdist]",),
    ),
)


def main(names: list[str]) -> int:
    mutants = [mutant for mutant in GPU_MUTANTS if not names or mutant.name in names]
    if found := troubles(mutants):
        raise SystemExit("\n".join(found))
    check_unchanged(mutants)
    survived = [mutant.name for mutant in mutants if not try_out(mutant)]
    print(f"{len(mutants) - len(survived)} of {len(mutants)} found", *survived)
    return int(bool(survived))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
