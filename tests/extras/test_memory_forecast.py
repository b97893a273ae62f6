"""The tensors of real steps, counted on two ranks, against what was predicted without numbers; and
what cannot be predicted."""

from __future__ import annotations

from pathlib import Path

import memory_on_ranks
import pytest
import torch
from memory_on_ranks import MPI, predicted
from pool import on_ranks
from ranks import FULL, HIGHEST_STAGE, needs_extra, needs_mpirun, of_this_copy

from hvdtrain.comm.communicator import SingleProcessCommunicator
from hvdtrain.config.read import configure
from hvdtrain.data.field import Field
from hvdtrain.errors import UserError
from hvdtrain.extras.memory_forecast.live_storages import LiveStorages
from hvdtrain.frameworks.footprint import Footprint, PlannedStep
from hvdtrain.frameworks.torch.build import footprint
from hvdtrain.tasks.classification import without_statistics
from hvdtrain.tasks.language import Language
from hvdtrain.training.job_memory import forget_peak, resident_bytes
from hvdtrain.training.telemetry.telemetry import peak_memory_bytes

IMAGES = without_statistics((8, 8, 1), 10)

HYBRID = "alexnet model.widths=[16,32,32,32,32] model.dense=[256,256]"


@pytest.mark.in_turn
def test_a_step_takes_what_was_predicted() -> None:
    """Of one process, as the next test."""
    case = "2 all 2"
    found = memory_on_ranks.by_case(SingleProcessCommunicator(), [case])[case]
    assert all(
        found["predicted"][kind] == found["counted"][kind]
        for kind in ("weights", "gradients", "optimizer_state")
    )
    assert found["step"] == pytest.approx(found["sum"], rel=0.005)


@pytest.mark.slow
@needs_mpirun
def test_a_step_on_two_ranks_takes_what_was_predicted() -> None:
    """Weights, gradients, optimizer state, buckets and what is sent exactly; all together within
    half a percent.

    wide_resnet has blocks of many sizes.
    """
    cases = [
        "0 none 1",
        "2 all 2",
        *["3 all 2"] * (HIGHEST_STAGE == "shard.stage=3"),
        *["1 none 2"] * FULL,
    ]
    gpt = "gpt model.layers=2 model.width=32 model.heads=2 optim.name=adamw optim.clip_norm=1"
    cases += [f"2:{gpt} parallel.tensor=2 parallel.sequence=true", f"2:{HYBRID} parallel.dense=c"]
    cases += [f"2:{gpt} comm.local_steps=4 comm.local_from=0.5", f"2:{gpt} parallel.context=2"]
    stages = [f"4:{gpt} parallel.pipeline=2 shard.stage=1"]
    if FULL:
        cases += ["2:wide_resnet shard.stage=0", "2:wide_resnet shard.stage=3 model.recompute=all"]
        cases += [
            f"2:{gpt} parallel.tensor=2",
            f"2:{gpt} parallel.tensor=2 shard.stage=3 model.tied=true",
            f"2:{gpt} parallel.context=2 parallel.context_by=ulysses shard.stage=2",
        ]
        cases.append("2:wide_resnet comm.local_steps=4 comm.local_from=1")
        stages.append(f"4:{gpt} parallel.pipeline=2 parallel.schedule=zero_bubble")
    cases = of_this_copy(cases)
    stages = of_this_copy(stages)
    found = on_ranks("mpi", 2, "memory_on_ranks:by_case", [*cases, *stages])[0]
    for case in (*cases, *stages):  # of stages the largest, whichever rank has it
        assert found[case]["planned to send"] == found[case]["sent"], case
        assert found[case]["step"] == pytest.approx(found[case]["sum"], rel=0.005), case
    for case in cases:
        counted = found[case]["counted"]
        planned = found[case]["predicted"]
        for kind in ("weights", "gradients", "optimizer_state", "communication"):
            assert planned[kind] == counted[kind], (case, kind)
    assert found["2 all 2"]["sum"] < 0.5 * found["0 none 1"]["sum"]


def test_a_storage_that_is_resized_is_followed() -> None:
    """FSDP2 frees and allocates whole weights so: 4,000 bytes and nothing, then 8,000 bytes and a
    number."""
    with LiveStorages() as live:
        whole = torch.ones(1000)
        whole.untyped_storage().resize_(0)
        small = torch.ones(1)
        live.reset_peak()
        assert sum(live.now.values()) == live.peak_bytes == 4
        whole.untyped_storage().resize_(8000)
        whole.fill_(1)
        assert live.now["weights"] == 8000 and live.peak_bytes == 8004
        whole.untyped_storage().resize_(0)
        small.add_(1)
        assert sum(live.now.values()) == 4
        whole.untyped_storage().resize_(8000)
        whole.fill_(1)
        assert live.now["weights"] == 8000
        del whole
        assert sum(live.now.values()) == 4


@needs_extra("fully_sharded")
def test_stage_3_has_parts_and_one_whole_unit() -> None:
    """mlp, one unit, 2 ranks, sgd. Between steps: half of the weights and of the momentum. Most is
    alive while gradients are added up, when the whole weights are freed: a buffer with all
    gradients, the engine's copy of it, and the half that comes back."""
    sizes = 64 * 500 + 500 + 500 * 500 + 500 + 500 * 10 + 10
    found = predicted("optim.name=sgd", "shard.stage=3", ranks=2, samples=1)
    assert found.optimizer_state == found.checkpoint - found.optimizer_state == 2 * sizes
    assert found.step == pytest.approx(4 * sizes * (0.5 + 0.5 + 1 + 1 + 0.5), rel=0.001)


def test_adam_takes_four_times_the_weights_and_its_shards_less() -> None:
    """P bytes of weights: replicated 4 P; stage 2 on 4 ranks P + 3 P / 4, and a bucket.

    The copy for a checkpoint is 3 P, or P and rank 0's part of 2 P.
    """
    sizes = 64 * 500 + 500 + 500 * 500 + 500 + 500 * 10 + 10
    whole = predicted("optim.name=adam", ranks=4)
    assert (whole.weights, whole.gradients, whole.optimizer_state) == (
        4 * sizes,
        4 * sizes,
        8 * sizes,
    )
    parts = predicted("optim.name=adam", "shard.stage=2", ranks=4)
    assert (parts.weights, parts.gradients, parts.optimizer_state) == (
        4 * sizes,
        sizes + sizes % 4,
        2 * (sizes + sizes % 4),
    )
    assert parts.communication == 4 * sizes and whole.checkpoint == 12 * sizes
    assert parts.checkpoint == parts.weights + parts.optimizer_state
    assert (whole.largest_array, parts.largest_array) == (4 * 500 * 500, 4 * 500 * 500)
    assert whole.staging == 2**20, "torch takes page-locked memory in powers of two"


@needs_extra("dense")
def test_a_dense_part_over_ranks_is_predicted() -> None:
    """Of 4 bytes each: 10 x 9 + 10 weights of the convolution on every rank, of the dense layers
    (10 -> 6 -> 10) half; Adam: two."""
    words = (
        "model.name=convnet",
        "model.widths=[10]",
        "model.norm=false",
        "model.dense=[6]",
        "optim.name=adam",
        "parallel.dense=a",
    )
    found, dense = predicted(*words, ranks=2), (10 + 1) * 6 + (6 + 1) * 10
    assert (found.weights, found.optimizer_state) == (
        4 * (100 + dense // 2),
        2 * 4 * (100 // 2 + dense // 2),
    )


@needs_extra("tensor")
def test_parts_of_the_positions_are_predicted() -> None:
    """The block keeps 4 A between its cut layers, of which a rank of two has half; what is gathered
    at the peak takes some of it."""
    task = Language(Field("int64", (65,), 16))
    step = PlannedStep(4, 1, 4, 0, writes_checkpoints=False)
    words = [
        "task.name=language",
        "model.name=gpt",
        "model.layers=1",
        "model.width=32",
        "model.heads=2",
        "parallel.tensor=2",
    ]
    whole, parts = (
        footprint(configure(None, [*words, f"parallel.sequence={on}"]), task, step, 2, MPI)
        for on in ("false", "true")
    )  # type: ignore[arg-type]
    block = 4 * 64 * 32 * 4  # bytes of A: (samples, positions, width) of float32
    assert 1.2 * block < whole.activations - parts.activations < 2.1 * block


def test_rules_types_and_passes_change_what_they_should() -> None:
    sgd = predicted("optim.name=sgd")
    half = predicted("optim.name=sgd", "speed.precision=fp16")
    assert sgd.optimizer_state == sgd.weights == half.weights  # masters are float32
    assert predicted("speed.precision=fp64").weights == 2 * sgd.weights
    assert predicted("optim.name=torch.optim.Adam").optimizer_state == pytest.approx(
        2 * sgd.weights, rel=1e-3
    )
    assert predicted(samples=4000, passes=4).activations < 0.3 * predicted(samples=4000).activations
    clipped = predicted("optim.clip_norm=1")
    assert clipped.workspace > sgd.workspace


def test_dropout_that_draws_indices_is_predicted() -> None:
    """Its number of draws depends on numbers that a prediction does not have."""
    plain, dropped = (
        predicted("model.name=wide_resnet", "model.widths=[4,4,8,8]", f"model.dropout={share}")
        for share in (0, 0.01)
    )
    assert plain.activations < dropped.activations < 1.5 * plain.activations


def test_nothing_is_allocated_and_no_random_number_is_drawn() -> None:
    torch.manual_seed(7)
    before = torch.get_rng_state()
    predicted()  # loads what predicts
    forget_peak()
    resident = resident_bytes()
    assert predicted("model.widths=[30000,30000]", samples=1).weights > 3.6e9
    assert peak_memory_bytes() < resident + 100e6
    assert torch.equal(before, torch.get_rng_state())


def test_a_model_that_reads_numbers_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "reads.py").write_text(
        "import torch\n"
        "class Net(torch.nn.Linear):\n"
        "    def __init__(self, outputs):\n        super().__init__(64, outputs)\n"
        "    def forward(self, x):\n        x.detach().numpy()\n        return "
        "super().forward(x.flatten(1))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    step = PlannedStep(8, 1, 4, 0, writes_checkpoints=False)
    with pytest.raises(UserError, match="the memory of reads:Net cannot be predicted: "):
        footprint(configure(None, ["model.name=reads:Net"]), IMAGES, step, 1, MPI)  # type: ignore[arg-type]


def test_buckets_of_nccl_are_predicted_at_their_size() -> None:
    """25 MiB instead of 4, if the job is on GPUs: stage 2 has a buffer for a bucket."""
    words = ["model.name=mlp", f"model.widths={[700] * 12}", "shard.stage=2"]
    step = PlannedStep(8, 1, 4, 0, writes_checkpoints=False)
    nccl = MPI | {"nccl"}

    def of(*more: str) -> Footprint:
        return footprint(configure(None, [*words, *more]), IMAGES, step, 2, nccl)  # type: ignore[arg-type]

    default = of()
    assert default == of("comm.bucket_mb=25") != of("comm.bucket_mb=4")
    assert of("speed.device=cpu") == of("comm.bucket_mb=4", "speed.device=cpu")
