"""Schedules, scaling, warm-up and growth against values worked out by hand, at every boundary; and
the messages of contradictions."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path

import pytest
from ranks import needs_extra

from hvdtrain.config.read import configure
from hvdtrain.config.schema import Config
from hvdtrain.config.sections.batch import BatchConfig
from hvdtrain.core.progress import ENDLESS, Progress
from hvdtrain.errors import UserError
from hvdtrain.recipe import from_config
from hvdtrain.recipe.batch import Growth, batches_instead_of_decays, resolve_batch_size
from hvdtrain.recipe.clock import clock, total_epochs, total_samples
from hvdtrain.recipe.recipe import Recipe, scaling
from hvdtrain.recipe.schedules import (
    Chain,
    Constant,
    ConstantWarmup,
    Cosine,
    Exponential,
    Polynomial,
    Steps,
    Warmup,
)
from hvdtrain.recipe.summary import averages_lines, batch_summary, lr_summary, noise_summary

EPS = 1e-9  # epochs before a boundary


def recipe(*words: str, dataset: int = 1000) -> Recipe:
    config = configure(None, words)
    return from_config.recipe_from_config(config, dataset, 0.9)


def configured(*words: str) -> Config:
    return configure(None, words)


def walk(r: Recipe, dataset: int) -> list[tuple[int, int, float]]:
    """(step, batch, lr) of every step of the job."""
    p = Progress(dataset, round(dataset * r.epochs))
    steps = []
    while not p.done:
        h = r.at(p)
        assert h.step == p.step
        steps.append((p.step, h.batch, h.lr))
        p = p.advance(h.batch)
    return steps


SCHEDULES = [  # schedule, [(epochs, value worked out by hand)]
    (Constant(0.3), [(0, 0.3), (1e6, 0.3)]),
    (
        Steps(0.8, (2.0, 3.5), 0.5),
        [(0, 0.8), (2 - EPS, 0.8), (2, 0.4), (3.5 - EPS, 0.4), (3.5, 0.2), (99, 0.2)],
    ),
    (
        Cosine(1.0, 0.2, 2.0, 6.0),
        [(0, 1.0), (2, 1.0), (3, 0.6 + 0.4 * math.sqrt(0.5)), (4, 0.6), (6, 0.2), (7, 0.2)],
    ),
    (
        Polynomial(1.0, 0.2, 2.0, 6.0, 2.0),
        [(0, 1.0), (2, 1.0), (3, 0.2 + 0.8 * 0.5625), (4, 0.4), (6, 0.2), (9, 0.2)],
    ),
    (Polynomial(1.0, 0.0, 0.0, 4.0, 1.0), [(0, 1.0), (1, 0.75), (4, 0.0)]),
    (Exponential(0.8, 0.25, 1.0), [(0, 0.8), (1, 0.8), (1.5, 0.4), (2, 0.2), (3, 0.05)]),
    (Exponential(0.8, 0.25, 1.0, per=2.0), [(1, 0.8), (2, 0.4), (3, 0.2)]),
    (
        Chain((0.0, 2.0, 3.0), (Constant(1.0), Constant(2.0), Constant(3.0))),
        [(0, 1), (2 - EPS, 1), (2, 2), (3 - EPS, 2), (3, 3), (9, 3)],
    ),
    (Warmup(4.0, 0.1, Constant(0.5)), [(0, 0.1), (1, 0.2), (3, 0.4), (4, 0.5), (5, 0.5)]),
    (
        Warmup(2.0, 0.0, Steps(0.4, (1.0, 3.0), 0.5)),
        [(0, 0.0), (0.5, 0.1), (1, 0.1), (1.5, 0.15), (2, 0.2), (3, 0.1)],
    ),
    (ConstantWarmup(2.0, 0.1, Constant(0.5)), [(0, 0.1), (2 - EPS, 0.1), (2, 0.5)]),
]


@pytest.mark.parametrize(
    ("schedule", "values"),
    SCHEDULES,
    ids=[f"{type(s).__name__}-{i}" for i, (s, _) in enumerate(SCHEDULES)],
)
def test_schedules_by_hand(schedule: object, values: list[tuple[float, float]]) -> None:
    for epochs, value in values:
        assert schedule(epochs) == pytest.approx(value, abs=1e-8 if value else 1e-15), epochs


def test_schedules_print_and_compare() -> None:
    a, b = (Warmup(5.0, 0.1, Steps(3.2, (30.0, 60.0), 0.1)) for _ in range(2))
    assert a == b != dataclasses.replace(a, start=0.0)
    assert (
        repr(a) == "Warmup(epochs=5.0, start=0.1, then=Steps(value=3.2, milestones=(30.0, 60.0), "
        "gamma=0.1))"
    )
    assert recipe("recipe.warmup=1") == recipe("recipe.warmup=1") != recipe("recipe.warmup=2")


def test_scaling_rules() -> None:
    assert scaling("linear", 8192, 256) == 32
    assert scaling("sqrt", 1024, 256) == 2
    assert scaling("none", 1024, 256) == 1


GOYAL = ["optim.base_lr=0.1", "optim.base_batch=256", "batch.size=8192", "epochs=90", "recipe.warmup=5", "recipe.schedule=steps",  # noqa: E501
         "recipe.milestones=[30,60,80]"]  # fmt: skip


def test_goyal_by_hand() -> None:
    """8192 x 156.38 steps an epoch; 0.1 rises to 3.2 over 5 epochs, then a tenth at 30, 60, 80."""
    lr = recipe(*GOYAL, dataset=1281167).lr
    for epochs, value in [
        (0, 0.1),
        (2.5, 1.65),
        (5, 3.2),
        (30 - EPS, 3.2),
        (30, 0.32),
        (60, 0.032),
        (80, 0.0032),
        (90, 0.0032),
    ]:
        assert lr(epochs) == pytest.approx(value, rel=1e-8)


def test_warmup_by_steps_ends_at_that_very_step() -> None:
    """Batch 30 of 1,000: step n starts after 30 n samples; 7 steps rise from 0 to 0.7 by 0.1
    each."""
    r = recipe("batch.size=30", "optim.base_lr=0.7", "recipe.warmup=7 steps", "epochs=1")
    assert [lr for _, _, lr in walk(r, 1000)][:9] == pytest.approx(
        [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.7], abs=1e-12
    )


def test_start_of_the_warmup() -> None:
    words = ["optim.base_batch=50", "batch.size=100", "optim.base_lr=0.2", "recipe.warmup=1"]
    assert recipe(*words).lr(0) == 0.2, "base_lr, since scaling raises the rate"
    assert recipe(*words, "optim.base_batch=100").lr(0) == 0.0, "nothing is scaled"
    assert recipe(*words, "recipe.warmup_from=0.05").lr(0) == 0.05
    assert recipe(*words, "recipe.warmup=0").lr(0) == 0.4
    constant = recipe(*words, "recipe.warmup_kind=constant").lr
    assert [constant(e) for e in (0, 0.99, 1, 2)] == [0.2, 0.2, 0.4, 0.4]


def test_square_root_scaling() -> None:
    assert recipe(
        "recipe.scale=sqrt", "optim.base_batch=25", "batch.size=100", "optim.base_lr=0.3"
    ).lr(0) == pytest.approx(0.6)
    assert (
        recipe(
            "recipe.scale=none", "optim.base_batch=25", "batch.size=100", "optim.base_lr=0.3"
        ).lr(0)
        == 0.3
    )


def test_schedules_run_from_the_warmup_to_the_last_epoch() -> None:
    words = ["epochs=10", "recipe.warmup=2", "optim.base_lr=0.8"]
    cosine = recipe(*words, "recipe.schedule=cosine", "recipe.end_lr=0.2").lr
    assert [cosine(e) for e in (0, 1, 2, 6, 10)] == pytest.approx([0, 0.4, 0.8, 0.5, 0.2])
    square = recipe(*words, "recipe.schedule=polynomial", "recipe.end_lr=0").lr
    assert [square(e) for e in (2, 6, 10)] == pytest.approx([0.8, 0.2, 0])
    exponential = recipe(*words, "recipe.schedule=exponential", "recipe.gamma=0.5").lr
    assert [exponential(e) for e in (2, 3, 5)] == pytest.approx([0.8, 0.4, 0.1])


def test_a_chain_by_hand() -> None:
    chain = (
        "[{length: 2}, {kind: cosine, length: 4, end_lr: 0.2}, {kind: steps, scale: 0.5, "
        "milestones: [1, 2], gamma: 0.5}]"
    )
    lr = recipe("epochs=10", "optim.base_lr=0.8", "recipe.warmup=1", f"recipe.chain={chain}").lr
    values = [
        (0, 0),
        (0.5, 0.4),
        (1, 0.8),
        (3, 0.8),
        (5, 0.5),
        (7 - EPS, 0.2),
        (7, 0.4),
        (8 - EPS, 0.4),
        (8, 0.2),
        (9, 0.1),
        (9.9, 0.1),
    ]
    for epochs, value in values:
        assert lr(epochs) == pytest.approx(value, abs=1e-8), epochs


@pytest.mark.parametrize("warmup", ["5 steps", "1", "0.5", "37 samples"])
def test_the_lengths_of_a_chain_begin_after_the_warmup(warmup: str) -> None:
    """100 samples, batch 10: the 10 steps of the first piece are those after the warm-up, however
    long that is; by hand."""
    chain = (
        "[{kind: polynomial, length: 10 steps, end_lr: 0.02}, {length: 5 steps, scale: 0.2}, "
        "{kind: steps, milestones: [3 steps]}]"
    )
    r = recipe(
        "batch.size=10",
        "epochs=5",
        "optim.base_lr=0.1",
        f"recipe.warmup={warmup}",
        f"recipe.chain={chain}",
        dataset=100,
    )
    warm = {"5 steps": 5, "1": 10, "0.5": 5, "37 samples": 4}[warmup]
    rates = [rate for *_, rate in walk(r, 100)][warm:]
    first = [0.02 + 0.08 * (1 - done / 10) ** 2 for done in range(10)]
    if (
        warmup == "37 samples"
    ):  # of 40: the piece begins within a step, and lasts 10 steps from the next one on
        first = [0.02 + 0.08 * (1 - (10 * done + 3) / 103) ** 2 for done in range(10)]
    assert rates[:10] == pytest.approx(first, rel=1e-12)
    assert rates[10:15] == [0.1 * 0.2] * 5
    assert rates[15:] == pytest.approx([0.1] * 3 + [0.01] * (len(rates) - 18), rel=1e-12)


@pytest.mark.parametrize(
    ("words", "steps"),
    [
        ("batch.size=10 epochs=5 comm.local_steps=5", ""),  # 10 steps an epoch
        ("batch.size=10 epochs=5 comm.local_steps=3", "10 steps"),
        ("batch.size=100 epochs=5 comm.local_steps=3", "1 step"),
        ("batch.size=30 epochs=5 comm.local_steps=2", "3 or 4 steps"),  # 4, 3, 3, 4, ...
        ("batch.size=10 epochs=5 comm.local_steps=5 comm.local_from=5steps", ""),
        ("batch.size=10 epochs=2 comm.local_steps=5 comm.local_from=4steps", "6 to 10 steps"),
        ("batch.size=10 epochs=2 comm.local_steps=5 recipe.growth=milestones recipe.grow_at=[1] "
         "recipe.grow_to=[50]", "2 to 10 steps"),
        ("batch.size=10 stop.time=1h comm.local_steps=10", ""),
        ("batch.size=30 epochs=5", ""),
        ("batch.size=10 epochs=0.7 comm.local_steps=4", ""),  # no epoch ends but with the job
    ],
)  # fmt: skip
def test_the_header_says_where_the_end_of_an_epoch_averages_local_steps_too(
    words: str, steps: str
) -> None:
    config = configure(None, words.split())
    said = averages_lines(
        config.comm.local_steps, from_config.recipe_from_config(config, 100, 0.9), 100
    )
    assert len(said) == bool(steps)
    assert not steps or said[0] == (
        f"averages of the weights after each {config.comm.local_steps} local steps, and at the "
        f"end of each epoch, of {steps}: the count "
        "begins again there"
    )


def test_growth_instead_of_decays_by_hand() -> None:
    """100 samples, batch 10, x 0.2 at epochs 1, 2 and 3: batches 50, then 80 of 250 (the rest
    decays), then only decay."""
    words = [
        "batch.size=10",
        "epochs=4",
        "optim.base_lr=0.1",
        "recipe.schedule=steps",
        "recipe.milestones=[1,2,3]",
        "recipe.gamma=0.2",
    ]
    r = recipe(*words, "recipe.growth=decays", "recipe.batch_max=80", dataset=100)
    # from sample 100 on 50; from 200 on 80; the steps start at 200, 280; epoch 3 begins inside the
    # second: it is over at 360
    expected = [(i, 10, 0.1) for i in range(10)]
    expected += [
        (10, 50, 0.1),
        (11, 50, 0.1),
        (12, 80, 0.1 * 0.04 * 8),
        (13, 80, 0.1 * 0.04 * 8),
        (14, 80, 0.1 * 0.008 * 8),
    ]
    found = walk(r, 100)
    assert [(s, b) for s, b, _ in found] == [(s, b) for s, b, _ in expected]
    assert [lr for *_, lr in found] == pytest.approx([lr for *_, lr in expected], rel=1e-12)
    decays = recipe(*words, dataset=100)
    for epochs in (0, 1, 2, 3):  # the noise scale lr N / B falls alike (Smith 2017, eq. 5)
        assert r.at(Progress(100, 400, 0, epochs * 100)).lr / r.batch(epochs) == pytest.approx(
            decays.lr(epochs) / 10
        )


def test_growth_with_linear_scaling_and_warmup() -> None:
    """The rate follows the batch that it starts with; what the batch takes over from then on leaves
    it alone."""
    words = ["batch.size=20", "optim.base_batch=10", "optim.base_lr=0.1", "epochs=3", "recipe.warmup=1", "recipe.schedule=steps",  # noqa: E501
             "recipe.milestones=[2]", "recipe.gamma=0.5", "recipe.growth=decays", "recipe.batch_max=100"]  # fmt: skip  # noqa: E501
    found = walk(recipe(*words, dataset=100), 100)
    expected = [0.1, 0.12, 0.14, 0.16, 0.18, *[0.2] * 5, *[0.2] * 3]
    assert [b for _, b, _ in found] == [20] * 10 + [40] * 3
    assert [lr for *_, lr in found] == pytest.approx(expected, rel=1e-12)


def test_growth_at_milestones_by_hand_and_the_rate_that_follows() -> None:
    """Batch 10, 30 from epoch 1, 20 from epoch 2.5; a step has the batch of the epoch that it
    starts in."""
    words = [
        "batch.size=10",
        "epochs=3",
        "optim.base_lr=0.1",
        "recipe.growth=milestones",
        "recipe.grow_at=[1,2.5]",
        "recipe.grow_to=[30,20]",
    ]
    batches = [10] * 10 + [30] * 5 + [20] * 3  # 100, 250, then 270, 290, 310
    for scale, factors in (
        ("linear", (1, 3, 2)),
        ("sqrt", (1, 3**0.5, 2**0.5)),
        ("none", (1, 1, 1)),
    ):
        found = walk(recipe(*words, f"recipe.scale={scale}", dataset=100), 100)
        assert [b for _, b, _ in found] == batches
        rates = {10: factors[0] * 0.1, 30: factors[1] * 0.1, 20: factors[2] * 0.1}
        assert [lr for *_, lr in found] == pytest.approx([rates[b] for b in batches])


def test_growth_by_a_tiny_gamma_is_limited() -> None:
    assert batches_instead_of_decays(10, 1, 1e-320, 80) == (80,)


def resolved(provenance: dict[str, str], ranks: int = 4, **words: object) -> tuple[int, str]:
    per_rank = 8 if "batch.per_rank" in provenance else None
    batch = BatchConfig(size=64, per_rank=per_rank)
    config = Config(batch=batch, resume=str(words.get("resume", "no"))).with_provenance(provenance)
    config = resolve_batch_size(config, ranks)
    assert config.batch.per_rank is None
    return config.batch.size, config.where("batch.size")


def test_which_of_batch_size_and_per_rank_counts() -> None:
    """The command line before files; what a run was made with before the file that is given again;
    else a contradiction."""
    line = "command line"
    file = "x.yaml:3"
    assert resolved({"batch.per_rank": file}) == (
        32,
        "batch.size, batch.per_rank, x.yaml:3 x 4 ranks",
    )
    assert resolved({"batch.per_rank": file, "batch.size": line}) == (
        64,
        "batch.size, command line",
    )
    assert resolved({"batch.per_rank": line, "batch.size": file})[0] == 32
    assert (
        resolved({"batch.per_rank": file, "batch.size": "run/config.yaml:9"}, resume="run")[0] == 64
    )
    assert (
        resolved({"batch.per_rank": line, "batch.size": "run/config.yaml:9"}, resume="run")[0] == 32
    )
    for both in (
        {"batch.per_rank": line, "batch.size": line},
        {"batch.per_rank": file, "batch.size": file},
    ):
        for resume in ("no", "auto", "run"):
            with pytest.raises(UserError, match=r"batch\.size and batch\.per_rank are both given"):
                resolved(both, resume=resume)


LARS_ROWS = [  # MLPerf training 4.0: batch, rate, momentum, warm-up, decay, norm group, epochs
    (1632, 7.4, 0.9, 2, 5e-5, 204, 37), (3264, 10.5, 0.9, 2, 5e-5, 204, 37), (4096, 10, 0.9, 5, 2e-4, 64, 42),  # noqa: E501
    (8192, 17, 0.9, 5, 2e-4, 64, 44), (32768, 21.2, 0.94, 16, 2.5e-5, 128, 57), (65536, 24.699, 0.951807, 31, 1e-4, 128, 86),  # noqa: E501
]  # fmt: skip


@needs_extra("image_files")
def test_the_rows_of_the_lars_configuration() -> None:
    """Each row of its header, on the ranks that it names, is that of the reference, and the last
    row but one is the file itself."""
    path = Path(__file__).parents[2] / "configs" / "imagenet_lars.yaml"
    rows = [
        line[1:].split() for line in path.read_text().splitlines() if line.startswith("#   -np")
    ]
    found = []
    for _, ranks, *words in rows:
        config = configure(str(path), words)
        r = from_config.recipe_from_config(config, 1281167, 0.9)
        assert config.optim.momentum is not None
        found.append((config.batch.size, r.lr(config.recipe.warmup), config.optim.momentum, config.recipe.warmup,  # noqa: E501
                      config.optim.weight_decay, config.norm.ghost, r.epochs))  # fmt: skip
        assert config.batch.size // int(ranks.rstrip(":")) == config.norm.ghost, (
            "a rank's share is the norm group"
        )
        assert r.lr(r.epochs) == pytest.approx(1e-4)
    assert found == LARS_ROWS
    assert configure(str(path), []) == configure(str(path), rows[4][2:])


def test_smith_cifar_by_hand() -> None:
    """Smith 2017, section 5.1: 128, 640, 3200, 16000 where the rate would be divided by 5 at 60,
    120, 160."""
    grown = Growth(128, (60.0, 120.0, 160.0), batches_instead_of_decays(128, 3, 0.2, 16000))
    assert grown == Growth(128, (60.0, 120.0, 160.0), (640, 3200, 16000))
    assert [grown(e) for e in (0, 60 - EPS, 60, 120, 160, 200)] == [
        128,
        128,
        640,
        3200,
        16000,
        16000,
    ]


def test_regime_adaptation_multiplies_every_count_of_epochs() -> None:
    """ceil(300 / 128) = 3 (Hoffer 2017, section 5)."""
    words = ["batch.size=300", "optim.base_batch=128", "recipe.scale=none", "optim.base_lr=1", "epochs=10", "recipe.warmup=1",  # noqa: E501
             "recipe.schedule=steps", "recipe.milestones=[4,8]", "recipe.adapt_regime=true"]  # fmt: skip  # noqa: E501
    r = recipe(*words)
    assert r.epochs == 30
    values = [(1.5, 0.5), (3, 1), (12 - EPS, 1), (12, 0.1), (24, 0.01)]
    assert [r.lr(e) for e, _ in values] == pytest.approx([v for _, v in values])
    grown = recipe(*words, "recipe.growth=decays", "recipe.batch_max=600").batch
    assert grown == Growth(300, (12.0, 24.0), (600, 600))


def test_noise_of_a_step() -> None:
    """s^2 = c (B / base - 1) = 0.5 (160 / 32 - 1) = 2; eta / (1 + t)^0.55 with t = 31: 2^-2.75."""
    r = recipe(
        "batch.size=160",
        "optim.base_batch=32",
        "recipe.sample_noise=0.5",
        "recipe.gradient_noise=0.01",
    )
    h = r.at(Progress(1000, 10000, step=31, samples=31 * 160))
    assert h.sample_noise == pytest.approx(math.sqrt(2))
    assert h.noise == pytest.approx(0.01 * 2**-2.75)
    assert (
        recipe().at(Progress(1000, 10000)).noise
        == recipe().at(Progress(1000, 10000)).sample_noise
        == 0
    )


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (GOYAL, "lr 0.1 x 8192/256 = 3.2 after 5 warm-up epochs (linear scaling, from 0.1), then "
                "x 0.1 at epochs 30, 60, 80"),
        ([], "lr 0.02"),
        (["recipe.warmup=1", "recipe.schedule=cosine"], "lr 0.02 after 1 warm-up epoch (from 0), "
                                                        "then cosine to 0"),
        (["recipe.scale=sqrt", "optim.base_batch=16", "recipe.warmup=9 steps", "recipe.warmup_kind=constant"],  # noqa: E501
         "lr 0.02 x sqrt(64/16) = 0.04 after 9 warm-up steps (sqrt scaling, all at 0.02)"),
        (["recipe.schedule=polynomial", "recipe.end_lr=1e-4"], "lr 0.02, then polynomial of power "
                                                               "2 to 0.0001"),
        (["recipe.chain=[{length: 3},{kind: exponential, scale: 0.5}]"],
         "lr 0.02, then constant for 3 epochs, then x 0.1 in each epoch from x 0.5"),
        (["recipe.growth=milestones", "recipe.grow_at=[2,3.5]", "recipe.grow_to=[512,128]"],
         "lr 0.02; follows the batch (linear): 0.16 from epoch 2, 0.04 from epoch 3.5"),
        (["recipe.schedule=steps", "recipe.milestones=[4]", "recipe.growth=decays", "recipe.batch_max=128"],  # noqa: E501
         "lr 0.02, then x 0.1 at epochs 4, replaced by batch growth up to 128"),
        (["optim.base_batch=32", "recipe.scale=none", "recipe.adapt_regime=true", "recipe.schedule=steps", "recipe.milestones=[4]"],  # noqa: E501
         "lr 0.02, then x 0.1 at epochs 8; regime adapted: 2 times the epochs"),
    ],
)  # fmt: skip
def test_lr_summary(words: list[str], line: str) -> None:
    assert lr_summary(configured(*words), 50000) == line


def test_noise_summary() -> None:
    """Of variance 0.5 (160 / 32 - 1) = 2."""
    words = ["batch.size=160", "optim.base_batch=32", "recipe.sample_noise=0.5"]
    assert noise_summary(configured(*words)) == "losses of samples weighted with variance 2"
    grown = [*words, "recipe.growth=milestones", "recipe.grow_at=[1]", "recipe.grow_to=[320]"]
    assert (
        noise_summary(configured(*grown)) == "losses of samples weighted with variance 2 at first"
    )
    assert (
        noise_summary(configured("recipe.gradient_noise=0.01"))
        == "gradient noise of variance 0.01 / (1 + step)^0.55"
    )
    assert noise_summary(configured()) == ""


def test_batch_summary() -> None:
    words = ["recipe.growth=milestones", "recipe.grow_at=[1,2.5]", "recipe.grow_to=[128,256]"]
    assert batch_summary(recipe(*words)) == "64, 128 from epoch 1, 256 from epoch 2.5"
    assert batch_summary(recipe()) == "64"


STEPS = ["recipe.schedule=steps", "recipe.milestones=[1]"]


@pytest.mark.parametrize(
    ("words", "what", "key"),
    [
        (["recipe.schedule=steps"], "recipe.schedule=steps needs "
                                    "recipe.milestones", "recipe.schedule"),
        (["recipe.milestones=[3]"], "recipe.milestones needs recipe.schedule=steps; it is "
                                    "constant", "recipe.milestones"),
        (["recipe.schedule=steps", "recipe.milestones=[3,3]"], "recipe.milestones is [3, 3]", "recipe.milestones"),  # noqa: E501
        (["recipe.schedule=steps", "recipe.milestones=[0]"], "recipe.milestones is [0]", "recipe.milestones"),  # noqa: E501
        (["recipe.schedule=cosine", "recipe.chain=[{length: 1}]"],
         "recipe.chain and recipe.schedule=cosine both set the schedule", "recipe.chain"),
        (["recipe.chain=[{kind: cosine},{kind: constant}]"],
         "recipe.chain[0] has no length; only the last piece may omit it", "recipe.chain"),
        (["recipe.chain=[{length: 0},{kind: "
          "constant}]"], "wrong value for recipe.chain[0].length: 0", "recipe.chain"),
        (["recipe.chain=[{kind: "
          "steps}]"], "recipe.chain[0] is of kind steps without milestones", "recipe.chain"),
        (["recipe.schedule=steps", "recipe.milestones=[.nan]"], "wrong value for "
                                                                "recipe.milestones[0]: nan", "recipe.milestones"),  # noqa: E501
        (["recipe.growth=milestones", "recipe.grow_at=[.inf]", "recipe.grow_to=[9]"],
         "wrong value for recipe.grow_at[0]: inf", "recipe.grow_at"),
        (["recipe.chain=[{milestones: "
          "[1]}]"], "recipe.chain[0] is of kind constant with milestones", "recipe.chain"),
        (["recipe.chain=[{scale: .nan}]"], "recipe.chain[0].scale is nan", "recipe.chain"),
        (["recipe.chain=[{kind: exponential, gamma: "
          "-0.5}]"], "recipe.chain[0].gamma is -0.5", "recipe.chain"),
        (["recipe.chain=[{kind: polynomial, power: "
          "-1}]"], "recipe.chain[0].power is -1", "recipe.chain"),
        (["recipe.chain=[{kind: cosine, end_lr: "
          ".nan}]"], "recipe.chain[0].end_lr is nan", "recipe.chain"),
        (["recipe.schedule=exponential", "recipe.gamma=1000", "epochs=200"],
         "the learning rate grows beyond the largest float", "recipe.gamma"),
        (["recipe.chain=[{length: 10},{kind: "
          "cosine}]"], "recipe.chain's last piece begins at epoch 10 of 10", "recipe.chain"),
        (["recipe.growth=decays", "recipe.batch_max=80"],
         "recipe.growth=decays needs recipe.schedule=steps; it is constant", "recipe.growth"),
        ([*STEPS, "recipe.growth=decays", "recipe.batch_max=80", "recipe.gamma=1"],
         "recipe.growth=decays needs recipe.gamma between 0 and 1; it is 1", "recipe.gamma"),
        ([*STEPS, "recipe.growth=decays"], "recipe.growth=decays needs recipe.batch_max of "
                                           "batch.size=64 or more", "recipe.batch_max"),
        ([*STEPS, "recipe.batch_max=80"], "recipe.batch_max needs recipe.growth=decays; it is "
                                          "none", "recipe.batch_max"),
        ([*STEPS, "recipe.growth=decays", "recipe.batch_max=1001"], "batch 640 is more than the "
                                                                    "500 training samples", "recipe.batch_max"),  # noqa: E501
        (["recipe.growth=milestones", "recipe.grow_at=[1]"], "recipe.grow_at has 1 lengths, "
                                                             "recipe.grow_to 0 batches", "recipe.grow_to"),  # noqa: E501
        (["recipe.growth=milestones", "recipe.grow_at=[1]", "recipe.grow_to=[0]"], "recipe.grow_to is [0]", "recipe.grow_to"),  # noqa: E501
        (["recipe.growth=milestones", "recipe.grow_at=[1]", "recipe.grow_to=[501]"], "batch 501 "
                                                                                     "is more "
                                                                                     "than the "
                                                                                     "500", "recipe.grow_to"),  # noqa: E501
        (["recipe.grow_at=[1]"], "recipe.grow_at and recipe.grow_to need "
                                 "recipe.growth=milestones; it is none", "recipe.grow_at"),
        (["recipe.adapt_regime=true"],
         "recipe.adapt_regime and recipe.sample_noise compare the batch with "
         "optim.base_batch", "optim.base_batch"),
        (["recipe.sample_noise=1"],
         "recipe.adapt_regime and recipe.sample_noise compare the batch with "
         "optim.base_batch", "optim.base_batch"),
        (["recipe.warmup=10", "recipe.schedule=cosine"], "a warm-up of 10 epochs leaves "
                                                         "nothing", "recipe.warmup"),
        (["batch.size=501"], "batch 501 is more than the 500 training samples", "batch.size"),
    ],
)  # fmt: skip
def test_recipe_errors_name_their_key(words: list[str], what: str, key: str) -> None:
    with pytest.raises(UserError) as caught:
        recipe(*words, dataset=500)
    assert what in caught.value.what
    assert caught.value.where.startswith(key)
    assert caught.value.fix


def epochs_of(
    value: float | str, *words: str, dataset: int = 1000, context: int | None = None
) -> float:
    """Where a warm-up of this length ends."""
    config = configured(f"recipe.warmup={value}", *words)
    r = from_config.recipe_from_config(config, dataset, 0.9, context)
    return from_config.warmup_epochs(config, clock(config, dataset, context), r.batch)


GROWS = [
    "recipe.growth=milestones",
    "recipe.grow_at=[1,1.5]",
    "recipe.grow_to=[250,50]",
    "batch.size=100",
]


@pytest.mark.parametrize(
    ("value", "words", "epochs"),
    [
        (2, [], 2.0),
        ("2 epochs", [], 2.0),
        ("2.5epochs", [], 2.5),
        ("1 epoch", [], 1.0),
        ("500 samples", [], 0.5),
        ("1e4 samples", [], 10.0),
        ("3.2e4 tokens", [], 0.5),
        ("10%", ["epochs=30"], 3.0),
        ("10 %", ["epochs=2.5"], 0.25),
        ("7 steps", ["batch.size=30"], 0.21),
        ("10 steps", GROWS, 1.0),
        ("12 steps", GROWS, 1.5),  # 10 of 100, 2 of 250
        ("13 steps", GROWS, 1.55),
        ("50%", [*GROWS, "stop.steps=24"], 1.5),
        ("50%", [*GROWS, "stop.steps=21"], 1.125),  # half of a step has half of its samples
        ("50%", [*GROWS, "epochs=1.2", "stop.steps=24"], 0.6),  # of the end that comes first
        ("1 epoch", ["recipe.adapt_regime=true", "batch.size=300", "optim.base_batch=128"], 3.0),
        (
            "1000 samples",
            ["recipe.adapt_regime=true", "batch.size=300", "optim.base_batch=128"],
            1.0,
        ),
    ],
)
def test_a_length_in_any_unit_by_hand(value: float | str, words: list[str], epochs: float) -> None:
    """1,000 samples of 64 tokens."""
    assert epochs_of(value, *words, context=64) == epochs


def test_milestones_pieces_and_growth_take_lengths_of_any_unit() -> None:
    """Batch 50 of 1,000 samples: an epoch is 20 steps."""
    words = ["batch.size=50", "optim.base_lr=1", "recipe.gamma=0.5", "recipe.schedule=steps"]
    lr = recipe(*words, "recipe.milestones=[10 steps, 750 samples, 50%]", "epochs=2").lr
    assert [lr(e) for e in (0, 0.499, 0.5, 0.75, 1.0)] == [1, 1, 0.5, 0.25, 0.125]
    chain = (
        "recipe.chain=[{length: 10 steps}, {kind: linear, length: 25%, end_lr: 0.5}, {kind: "
        "steps, milestones: [5 steps]}]"
    )
    lr = recipe("batch.size=50", "optim.base_lr=1", "epochs=2", chain).lr
    assert [lr(e) for e in (0.4, 0.5, 0.75, 1.0, 1.2, 1.25)] == pytest.approx(
        [1, 1, 0.75, 1, 1, 0.1]
    )
    grown = recipe(
        "batch.size=50",
        "stop.steps=40",
        "recipe.growth=milestones",
        "recipe.grow_at=[25%, 30 steps]",
        "recipe.grow_to=[100,20]",
    )
    assert grown.batch == Growth(50, (0.5, 2.5), (100, 20)), "10 steps of 50, 20 of 100"
    assert grown.epochs == 2.7
    assert [(step, batch) for step, batch, _ in walk(grown, 1000)][9::10] == [
        (9, 50),
        (19, 100),
        (29, 100),
        (39, 20),
    ]


def test_local_steps_begin_where_a_length_of_any_unit_ends() -> None:
    """Batch 50 of 1,000 samples: a step belongs to the part of the job in which it begins."""
    for length, steps in {"10 steps": 10, "15%": 6, 1: 20, "151 samples": 4, 0: 0}.items():
        r = recipe("batch.size=50", "epochs=2", "comm.local_steps=2", f"comm.local_from={length}")
        found = [r.at(Progress(1000, 2000, step, 50 * step)).together for step in range(40)]
        assert found == [True] * steps + [False] * (40 - steps), length


def test_schedules_end_with_the_job_that_stop_steps_ends() -> None:
    """Batch 30 of 1,000: the cosine is at its end after the last of 20 steps; without stop.steps it
    would be at epoch 10."""
    for words in (
        ["stop.steps=20"],
        ["epochs=0.6"],
        ["stop.steps=20", "epochs=7"],
        ["max_steps=20"],
        ["stop.epochs=0.6"],
    ):
        r = recipe("batch.size=30", "optim.base_lr=1", "recipe.schedule=cosine", *words)
        assert r.epochs == 0.6
        expected = [(1 + math.cos(math.pi * step / 20)) / 2 for step in range(20)]
        assert [lr for *_, lr in walk(r, 1000)] == pytest.approx(expected, abs=1e-12), words


@pytest.mark.parametrize(
    ("words", "epochs", "samples"),
    [
        ([], 10, 10_000),
        (["epochs=0.7"], 0.7, 700),  # not 701, though 0.7 x 10^k rounds up for some k
        (["epochs=1.1"], 1.1, 1100),
        (["epochs=2.0001"], 2.0001, 2001),  # the first whole sample at 2.0001 epochs or later
        (["stop.steps=5"], None, ENDLESS),
        (["stop.time=2h"], None, ENDLESS),
        (["stop.time=2h", "epochs=3"], 3, 3000),
        (["stop.steps=5", "stop.steps=null"], 10, 10_000),
    ],
)
def test_the_length_of_a_job(words: list[str], epochs: float | None, samples: int) -> None:
    config = configured(*words)
    assert (total_epochs(config), total_samples(config, 1000)) == (epochs, samples)


CONTEXTS = {
    "image_gpt_cifar10": (50_000, 1024),
    "image_gpt_cifar10_small": (50_000, 256),
    "image_gpt_digits": (1437, 64),
}


@pytest.mark.parametrize(
    "path",
    sorted((Path(__file__).parents[2] / "configs").rglob("*.yaml")),
    ids=lambda path: path.stem,
)
def test_each_configuration_can_be_tried_in_one_epoch(path: Path) -> None:
    """As it is, or with the argument that the message says."""
    dataset, context = CONTEXTS.get(
        path.stem, (50_000, 1024) if "image_gpt" in path.stem else (60_000, None)
    )
    try:
        from_config.recipe_from_config(configure(f"{path}", ["epochs=1"]), dataset, 0.9, context)
    except UserError as error:
        assert error.fix.startswith("recipe.warmup=10% is a tenth of the job, however short; or ")
        from_config.recipe_from_config(
            configure(f"{path}", ["epochs=1", error.fix.split()[0]]), dataset, 0.9, context
        )
        if longer := re.search(r"epochs=\d+", error.fix):
            from_config.recipe_from_config(configure(f"{path}", [longer[0]]), dataset, 0.9, context)


@pytest.mark.parametrize(
    ("words", "what", "key"),
    [
        (["recipe.warmup=5 minutes"], "wrong value for recipe.warmup: '5 "
                                      "minutes'", "recipe.warmup"),
        (["recipe.warmup=-1"], "wrong value for recipe.warmup: -1", "recipe.warmup"),
        (["recipe.warmup=101%"], "wrong value for recipe.warmup: '101%'", "recipe.warmup"),
        (["recipe.warmup=true"], "wrong value for recipe.warmup: True", "recipe.warmup"),
        (["recipe.warmup=1e3 tokens"], "a length of 1,000 tokens needs samples that all have the "
                                       "same number of tokens", "recipe.warmup"),
        (["recipe.warmup=100%", "recipe.schedule=cosine"],
         "a warm-up of 100% of the job (10 epochs) leaves nothing of 10 epochs for the "
         "schedule", "recipe.warmup"),
        (["recipe.warmup=90 steps", "recipe.schedule=linear"],
         "a warm-up of 90 steps (11.52 epochs) leaves nothing of 10 epochs for the "
         "schedule", "recipe.warmup"),
        (["recipe.schedule=steps", "recipe.milestones=[3, 9 steps]"],
         "recipe.milestones: 9 steps (1.152 epochs) come after 3 epochs", "recipe.milestones"),
        (["recipe.growth=milestones", "recipe.grow_at=[1, 300 samples]", "recipe.grow_to=[9,8]"],
         "recipe.grow_at: 300 samples (0.6 epochs) come after 1 epoch", "recipe.grow_at"),
        (["recipe.growth=milestones", "recipe.grow_at=[10%]", "recipe.grow_to=[9]", "epochs=1", "stop.steps=9"],  # noqa: E501
         "recipe.grow_at: the batch grows at 10% of the job, but either epochs or stop.steps may "
         "end it", "recipe.grow_at"),
        (["recipe.schedule=cosine", "stop.time=1h"],
         "recipe.schedule=cosine falls to the end of the job, but only stop.time=1h ends the "
         "job, at an unknown step",
         "recipe.schedule"),
        (["recipe.chain=[{length: 1},{kind: linear}]", "stop.time=1h"],
         "the last piece of recipe.chain falls to the end of the job, but only stop.time=1h ends "
         "the job", "recipe.chain"),
        (["recipe.warmup=10%", "stop.time=1h"],
         "recipe.warmup: 10% is a share of the job, but only stop.time=1h ends the "
         "job", "recipe.warmup"),
    ],
)  # fmt: skip
def test_errors_of_lengths(words: list[str], what: str, key: str) -> None:
    with pytest.raises(UserError) as caught:
        recipe(*words, dataset=500)
    assert what in caught.value.what
    assert caught.value.where.startswith(key)
    assert caught.value.fix


@needs_extra("other_words")
def test_old_keys_of_the_warmup_are_answered() -> None:
    for word in ("recipe.warmup_epochs=5", "recipe.warmup_steps=500", "recipe.warmup_tokens=1e6"):
        with pytest.raises(UserError, match="no such key") as caught:
            configured(word)
        assert caught.value.fix == "did you mean recipe.warmup?"


def test_a_kind_of_warmup_and_a_length_are_told_apart() -> None:
    with pytest.raises(UserError) as caught:
        configured("recipe.warmup=constant")
    assert caught.value.fix == "recipe.warmup_kind=constant, and recipe.warmup is its length"
    with pytest.raises(UserError, match=r"no such key: recipe.chain\[0\].epochs") as caught:
        configured("recipe.chain=[{epochs: 5}]")
    assert caught.value.fix == "did you mean length?"


def test_a_job_that_its_time_ends_may_have_lengths_of_its_own() -> None:
    chain = "recipe.chain=[{kind: cosine, length: 500 samples}, {scale: 0.1}]"
    r = recipe("stop.time=1h", "recipe.warmup=5 steps", chain, "batch.size=50", "optim.base_lr=1")
    assert r.epochs == math.inf
    assert [r.lr(e) for e in (0.1, 0.25, 0.5, 0.75, 99.0)] == pytest.approx(
        [0.4 * (1 + math.cos(0)) / 2, 1, 0.5, 0.1, 0.1]
    )


def test_the_rate_of_mingpt() -> None:
    """max(0.1, cosine) after a warm-up from 0, as in minGPT's trainer: 10 steps of 100 tokens, of
    which 2 are the warm-up."""
    config = configure(
        None,
        [
            "batch.size=10",
            "optim.base_lr=2",
            "epochs=1",
            "recipe.schedule=cosine",
            "recipe.floor=0.1",
            "recipe.warmup=200 tokens",
        ],
    )
    schedule = from_config.recipe_from_config(config, 100, 0.9, 10).lr
    tokens = [100 * step for step in range(10)]
    expected = [
        2 * (t / 200 if t < 200 else max(0.1, 0.5 * (1 + math.cos(math.pi * (t - 200) / 800))))
        for t in tokens
    ]
    assert [schedule(t / 1000) for t in tokens] == pytest.approx(expected, rel=1e-12)
    assert expected[-1] == 0.2
    assert (
        lr_summary(config, 100, 10)
        == "lr 2 after 200 warm-up tokens (from 0), then cosine to 0, never below 0.2"
    )
