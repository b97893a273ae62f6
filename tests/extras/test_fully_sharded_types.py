"""shard.stage=3 in 16 bits, on two ranks: what is gathered, what stays, and the weights of stage
0."""

from __future__ import annotations

import pytest
from half_types_on_ranks import COLOURS, WIDTH
from pool import on_ranks
from ranks import FULL, needs_mpirun, of_this_copy

GPT = "task.name=language model.name=gpt model.layers=2 model.width=32 model.heads=2"
ODD = "model.name=half_types_on_ranks:Odd"
LIKE_STAGE_0 = [
    f"{GPT} model.recompute=all optim.clip_norm=0.5",
    f"{GPT} model.tied=true speed.precision=fp16",
    f"{GPT} shard.offload=parameters",
    "model.name=wide_resnet model.widths=[4,4,8,8] speed.channels_last=false norm.kind=sync",
    ODD,
    *of_this_copy(
        [f"{GPT} shard.reshard=false", f"{GPT} parallel.tensor=2 parallel.sequence=true"] * FULL
    ),
]


@pytest.mark.in_turn
@needs_mpirun
def test_after_forward_a_rank_has_no_block_in_16_bits() -> None:
    """The head alone, which is no block's, stays until backward; autocast kept 12 WIDTH^2 numbers
    of each of 4 blocks, too."""
    cases = [f"shard.stage=3 speed.precision=bf16{more}" for more in ("", " model.recompute=all")]
    for found in on_ranks("mpi", 2, "half_types_on_ranks:alive_after_forward", cases):
        assert found == dict.fromkeys(cases, 2 * COLOURS * WIDTH)


@pytest.mark.in_turn
@needs_mpirun
def test_what_is_gathered_and_what_is_alive_is_as_planned() -> None:
    """Matrices and biases of blocks, and the head, in 16 bits; norms and embeddings in 32. A rank
    of two sends half of what is gathered, blocks for forward and for backward.
    """
    layers = 2
    width = 32
    colours = 512
    tokens = 256
    case = (
        f"2:gpt model.layers={layers} model.width={width} model.heads=2 model.recompute=all "
        "shard.stage=3 speed.precision=bf16"
    )
    found = on_ranks("mpi", 2, "memory_on_ranks:by_case", [case])[0][case]
    block = 2 * (12 * width**2 + 9 * width) + 4 * 4 * width
    rest = 2 * colours * width + 4 * (colours + tokens + 2) * width
    assert found["sent"][0]["all-gather"] == (2 * layers * block + rest) // 2
    assert found["planned to send"] == found["sent"]
    for kind in ("weights", "gradients", "optimizer_state", "communication"):
        assert found["predicted"][kind] == found["counted"][kind], kind
    assert found["step"] == pytest.approx(found["sum"], rel=0.005)


@pytest.mark.in_turn
@needs_mpirun
def test_weights_are_those_of_stage_0() -> None:
    """To a tenth of what 16 bits round: sums over ranks have another order."""
    found = on_ranks("mpi", 2, "half_types_on_ranks:apart", LIKE_STAGE_0)[0]
    for case, (apart, rounding, _) in found.items():
        assert apart < 0.1 * min(rounding, 1e-3), (case, apart, rounding)
    # others: router, last matrix, encoder
    own = 4 * 32 * 32
    layers = 65 * 32 + 33 * 32 + 10
    others = 4 * 33 + 32 * 10 + 6984
    assert (
        f", {(own + layers) / (own + layers + others):.1%} of the weights gathered in bfloat16 "
        "(ZeRO stage 3)" in found[ODD][2]
    )
