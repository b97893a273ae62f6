"""Schedules, scaling, warm-up and growth against values worked out by hand, at every boundary; and the messages of contradictions."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest

from hvdtrain.config.read import configure
from hvdtrain.config.schema import BatchConfig, Config
from hvdtrain.core.progress import Progress
from hvdtrain.errors import UserError
from hvdtrain.recipe import batch_growth, batch_size, from_config
from hvdtrain.recipe.batch_growth import Growth
from hvdtrain.recipe.recipe import Recipe, scaling
from hvdtrain.recipe.schedule import Chain, Constant, ConstantWarmup, Cosine, Exponential, Polynomial, Steps, Warmup
from hvdtrain.recipe.summary import batch_summary, lr_summary

EPS = 1e-9  # epochs before a boundary


def recipe(*words: str, dataset: int = 1000) -> Recipe:
    config = configure(None, words)
    return from_config.recipe_from_config(config, dataset, 0.9)


def configured(*words: str) -> Config:
    return configure(None, words)


def walk(r: Recipe, dataset: int) -> list[tuple[int, int, float]]:
    """(step, batch, lr) of every step of the job."""
    p, steps = Progress(dataset, dataset * r.epochs), []
    while not p.done:
        h = r.at(p)
        assert h.step == p.step
        steps.append((p.step, h.batch, h.lr))
        p = p.advance(h.batch)
    return steps


SCHEDULES = [  # schedule, [(epochs, value worked out by hand)]
    (Constant(0.3), [(0, 0.3), (1e6, 0.3)]),
    (Steps(0.8, (2.0, 3.5), 0.5), [(0, 0.8), (2 - EPS, 0.8), (2, 0.4), (3.5 - EPS, 0.4), (3.5, 0.2), (99, 0.2)]),
    (Cosine(1.0, 0.2, 2.0, 6.0), [(0, 1.0), (2, 1.0), (3, 0.6 + 0.4 * math.sqrt(0.5)), (4, 0.6), (6, 0.2), (7, 0.2)]),
    (Polynomial(1.0, 0.2, 2.0, 6.0, 2.0), [(0, 1.0), (2, 1.0), (3, 0.2 + 0.8 * 0.5625), (4, 0.4), (6, 0.2), (9, 0.2)]),
    (Polynomial(1.0, 0.0, 0.0, 4.0, 1.0), [(0, 1.0), (1, 0.75), (4, 0.0)]),
    (Exponential(0.8, 0.25, 1.0), [(0, 0.8), (1, 0.8), (1.5, 0.4), (2, 0.2), (3, 0.05)]),
    (Exponential(0.8, 0.25, 1.0, per=2.0), [(1, 0.8), (2, 0.4), (3, 0.2)]),
    (Chain((0.0, 2.0, 3.0), (Constant(1.0), Constant(2.0), Constant(3.0))), [(0, 1), (2 - EPS, 1), (2, 2), (3 - EPS, 2), (3, 3), (9, 3)]),
    (Warmup(4.0, 0.1, Constant(0.5)), [(0, 0.1), (1, 0.2), (3, 0.4), (4, 0.5), (5, 0.5)]),
    (Warmup(2.0, 0.0, Steps(0.4, (1.0, 3.0), 0.5)), [(0, 0.0), (0.5, 0.1), (1, 0.1), (1.5, 0.15), (2, 0.2), (3, 0.1)]),
    (ConstantWarmup(2.0, 0.1, Constant(0.5)), [(0, 0.1), (2 - EPS, 0.1), (2, 0.5)]),
]


@pytest.mark.parametrize(("schedule", "values"), SCHEDULES, ids=[f"{type(s).__name__}-{i}" for i, (s, _) in enumerate(SCHEDULES)])
def test_schedules_by_hand(schedule: object, values: list[tuple[float, float]]) -> None:
    for epochs, value in values:
        assert schedule(epochs) == pytest.approx(value, abs=1e-8 if value else 1e-15), epochs


def test_schedules_print_and_compare() -> None:
    a, b = (Warmup(5.0, 0.1, Steps(3.2, (30.0, 60.0), 0.1)) for _ in range(2))
    assert a == b != dataclasses.replace(a, start=0.0)
    assert repr(a) == "Warmup(epochs=5.0, start=0.1, then=Steps(value=3.2, milestones=(30.0, 60.0), gamma=0.1))"
    assert recipe("recipe.warmup_epochs=1") == recipe("recipe.warmup_epochs=1") != recipe("recipe.warmup_epochs=2")


def test_scaling_rules() -> None:
    assert scaling("linear", 8192, 256) == 32
    assert scaling("sqrt", 1024, 256) == 2
    assert scaling("none", 1024, 256) == 1


GOYAL = ["optim.base_lr=0.1", "optim.base_batch=256", "batch.size=8192", "epochs=90", "recipe.warmup_epochs=5", "recipe.schedule=steps",
         "recipe.milestones=[30,60,80]"]  # fmt: skip


def test_goyal_by_hand() -> None:
    """8192 x 156.38 steps an epoch; 0.1 rises to 3.2 over 5 epochs, then a tenth at 30, 60, 80."""
    lr = recipe(*GOYAL, dataset=1281167).lr
    for epochs, value in [(0, 0.1), (2.5, 1.65), (5, 3.2), (30 - EPS, 3.2), (30, 0.32), (60, 0.032), (80, 0.0032), (90, 0.0032)]:
        assert lr(epochs) == pytest.approx(value, rel=1e-8)


def test_warmup_by_steps_ends_at_that_very_step() -> None:
    """Batch 30 of 1,000: step n starts after 30 n samples; 7 steps rise from 0 to 0.7 by 0.1 each."""
    r = recipe("batch.size=30", "optim.base_lr=0.7", "recipe.warmup_steps=7", "epochs=1")
    assert [lr for _, _, lr in walk(r, 1000)][:9] == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.7], abs=1e-12)


def test_start_of_the_warmup() -> None:
    words = ["optim.base_batch=50", "batch.size=100", "optim.base_lr=0.2", "recipe.warmup_epochs=1"]
    assert recipe(*words).lr(0) == 0.2, "base_lr, since scaling raises the rate"
    assert recipe(*words, "optim.base_batch=100").lr(0) == 0.0, "nothing is scaled"
    assert recipe(*words, "recipe.warmup_from=0.05").lr(0) == 0.05
    assert recipe(*words, "recipe.warmup=none").lr(0) == 0.4
    constant = recipe(*words, "recipe.warmup=constant").lr
    assert [constant(e) for e in (0, 0.99, 1, 2)] == [0.2, 0.2, 0.4, 0.4]


def test_square_root_scaling() -> None:
    assert recipe("recipe.scale=sqrt", "optim.base_batch=25", "batch.size=100", "optim.base_lr=0.3").lr(0) == pytest.approx(0.6)
    assert recipe("recipe.scale=none", "optim.base_batch=25", "batch.size=100", "optim.base_lr=0.3").lr(0) == 0.3


def test_schedules_run_from_the_warmup_to_the_last_epoch() -> None:
    words = ["epochs=10", "recipe.warmup_epochs=2", "optim.base_lr=0.8"]
    cosine = recipe(*words, "recipe.schedule=cosine", "recipe.end_lr=0.2").lr
    assert [cosine(e) for e in (0, 1, 2, 6, 10)] == pytest.approx([0, 0.4, 0.8, 0.5, 0.2])
    square = recipe(*words, "recipe.schedule=polynomial", "recipe.end_lr=0").lr
    assert [square(e) for e in (2, 6, 10)] == pytest.approx([0.8, 0.2, 0])
    exponential = recipe(*words, "recipe.schedule=exponential", "recipe.gamma=0.5").lr
    assert [exponential(e) for e in (2, 3, 5)] == pytest.approx([0.8, 0.4, 0.1])


def test_a_chain_by_hand() -> None:
    chain = "[{epochs: 2}, {kind: cosine, epochs: 4, end_lr: 0.2}, {kind: steps, scale: 0.5, milestones: [1, 2], gamma: 0.5}]"
    lr = recipe("epochs=10", "optim.base_lr=0.8", "recipe.warmup_epochs=1", f"recipe.chain={chain}").lr
    values = [(0, 0), (0.5, 0.4), (1, 0.8), (2, 0.8), (4, 0.5), (6 - EPS, 0.2), (6, 0.4), (7 - EPS, 0.4), (7, 0.2), (8, 0.1), (9.9, 0.1)]
    for epochs, value in values:
        assert lr(epochs) == pytest.approx(value, abs=1e-8), epochs


def test_growth_instead_of_decays_by_hand() -> None:
    """100 samples, batch 10, x 0.2 at epochs 1, 2 and 3: batches 50, then 80 of 250 (the rest decays), then only decay."""
    words = ["batch.size=10", "epochs=4", "optim.base_lr=0.1", "recipe.schedule=steps", "recipe.milestones=[1,2,3]", "recipe.gamma=0.2"]
    r = recipe(*words, "recipe.growth=decays", "recipe.batch_max=80", dataset=100)
    # from sample 100 on 50; from 200 on 80; the steps start at 200, 280; epoch 3 begins inside the second: it is over at 360
    expected = [(i, 10, 0.1) for i in range(10)]
    expected += [(10, 50, 0.1), (11, 50, 0.1), (12, 80, 0.1 * 0.04 * 8), (13, 80, 0.1 * 0.04 * 8), (14, 80, 0.1 * 0.008 * 8)]
    found = walk(r, 100)
    assert [(s, b) for s, b, _ in found] == [(s, b) for s, b, _ in expected]
    assert [lr for *_, lr in found] == pytest.approx([lr for *_, lr in expected], rel=1e-12)
    decays = recipe(*words, dataset=100)
    for epochs in (0, 1, 2, 3):  # the noise scale lr N / B falls alike (Smith 2017, eq. 5)
        assert r.at(Progress(100, 400, 0, epochs * 100)).lr / r.batch(epochs) == pytest.approx(decays.lr(epochs) / 10)


def test_growth_with_linear_scaling_and_warmup() -> None:
    """The rate follows the batch that it starts with; what the batch takes over from then on leaves it alone."""
    words = ["batch.size=20", "optim.base_batch=10", "optim.base_lr=0.1", "epochs=3", "recipe.warmup_epochs=1", "recipe.schedule=steps",
             "recipe.milestones=[2]", "recipe.gamma=0.5", "recipe.growth=decays", "recipe.batch_max=100"]  # fmt: skip
    found = walk(recipe(*words, dataset=100), 100)
    expected = [0.1, 0.12, 0.14, 0.16, 0.18, *[0.2] * 5, *[0.2] * 3]
    assert [b for _, b, _ in found] == [20] * 10 + [40] * 3
    assert [lr for *_, lr in found] == pytest.approx(expected, rel=1e-12)


def test_growth_at_milestones_by_hand_and_the_rate_that_follows() -> None:
    """Batch 10, 30 from epoch 1, 20 from epoch 2.5; a step has the batch of the epoch that it starts in."""
    words = [
        "batch.size=10",
        "epochs=3",
        "optim.base_lr=0.1",
        "recipe.growth=milestones",
        "recipe.grow_at=[1,2.5]",
        "recipe.grow_to=[30,20]",
    ]
    batches = [10] * 10 + [30] * 5 + [20] * 3  # 100, 250, then 270, 290, 310
    for scale, factors in (("linear", (1, 3, 2)), ("sqrt", (1, 3**0.5, 2**0.5)), ("none", (1, 1, 1))):
        found = walk(recipe(*words, f"recipe.scale={scale}", dataset=100), 100)
        assert [b for _, b, _ in found] == batches
        rates = {10: factors[0] * 0.1, 30: factors[1] * 0.1, 20: factors[2] * 0.1}
        assert [lr for *_, lr in found] == pytest.approx([rates[b] for b in batches])


def test_growth_by_a_tiny_gamma_is_limited() -> None:
    assert batch_growth.growth_instead_of_decays(10, (1.0,), 1e-320, 80).to == (80,)


def resolved(provenance: dict[str, str], ranks: int = 4, **words: object) -> tuple[int, str]:
    per_rank = 8 if "batch.per_rank" in provenance else None
    batch = BatchConfig(size=64, per_rank=per_rank)
    config = Config(batch=batch, resume=str(words.get("resume", "no"))).with_provenance(provenance)
    config = batch_size.resolve_batch_size(config, ranks)
    assert config.batch.per_rank is None
    return config.batch.size, config.where("batch.size")


def test_which_of_batch_size_and_per_rank_counts() -> None:
    """The command line before files; what a run was made with before the file that is given again; else a contradiction."""
    line, file = "command line", "x.yaml:3"
    assert resolved({"batch.per_rank": file}) == (32, "batch.size, batch.per_rank, x.yaml:3 x 4 ranks")
    assert resolved({"batch.per_rank": file, "batch.size": line}) == (64, "batch.size, command line")
    assert resolved({"batch.per_rank": line, "batch.size": file})[0] == 32
    assert resolved({"batch.per_rank": file, "batch.size": "run/config.yaml:9"}, resume="run")[0] == 64
    assert resolved({"batch.per_rank": line, "batch.size": "run/config.yaml:9"}, resume="run")[0] == 32
    for both in ({"batch.per_rank": line, "batch.size": line}, {"batch.per_rank": file, "batch.size": file}):
        with pytest.raises(UserError, match=r"batch\.size and batch\.per_rank are both given"):
            resolved(both)


LARS_ROWS = [  # MLPerf training 4.0: batch, rate, momentum, warm-up, decay, norm group, epochs
    (1632, 7.4, 0.9, 2, 5e-5, 204, 37), (3264, 10.5, 0.9, 2, 5e-5, 204, 37), (4096, 10, 0.9, 5, 2e-4, 64, 42),
    (8192, 17, 0.9, 5, 2e-4, 64, 44), (32768, 21.2, 0.94, 16, 2.5e-5, 128, 57), (65536, 24.699, 0.951807, 31, 1e-4, 128, 86),
]  # fmt: skip


def test_the_rows_of_the_lars_configuration() -> None:
    """Each row of its header, on the ranks that it names, is that of the reference, and the last row but one is the file itself."""
    path = Path(__file__).parents[2] / "configs" / "imagenet_lars.yaml"
    rows = [line[1:].split() for line in path.read_text().splitlines() if line.startswith("#   -np")]
    found = []
    for _, ranks, *words in rows:
        config = configure(str(path), words)
        r = from_config.recipe_from_config(config, 1281167, 0.9)
        assert config.optim.momentum is not None
        found.append((config.batch.size, r.lr(config.recipe.warmup_epochs), config.optim.momentum, config.recipe.warmup_epochs,
                      config.optim.weight_decay, config.norm.ghost, r.epochs))  # fmt: skip
        assert config.batch.size // int(ranks.rstrip(":")) == config.norm.ghost, "a rank's share is the norm group"
        assert r.lr(r.epochs) == pytest.approx(1e-4)
    assert found == LARS_ROWS
    assert configure(str(path), []) == configure(str(path), rows[4][2:])


def test_smith_cifar_by_hand() -> None:
    """Smith 2017, section 5.1: 128, 640, 3200, 16000 where the rate would be divided by 5 at 60, 120, 160."""
    grown = batch_growth.growth_instead_of_decays(128, (60.0, 120.0, 160.0), 0.2, 16000)
    assert grown == Growth(128, (60.0, 120.0, 160.0), (640, 3200, 16000))
    assert [grown(e) for e in (0, 60 - EPS, 60, 120, 160, 200)] == [128, 128, 640, 3200, 16000, 16000]


def test_regime_adaptation_multiplies_every_count_of_epochs() -> None:
    """ceil(300 / 128) = 3 (Hoffer 2017, section 5)."""
    words = ["batch.size=300", "optim.base_batch=128", "recipe.scale=none", "optim.base_lr=1", "epochs=10", "recipe.warmup_epochs=1",
             "recipe.schedule=steps", "recipe.milestones=[4,8]", "recipe.adapt_regime=true"]  # fmt: skip
    r = recipe(*words)
    assert r.epochs == 30
    values = [(1.5, 0.5), (3, 1), (12 - EPS, 1), (12, 0.1), (24, 0.01)]
    assert [r.lr(e) for e, _ in values] == pytest.approx([v for _, v in values])
    grown = recipe(*words, "recipe.growth=decays", "recipe.batch_max=600").batch
    assert grown == Growth(300, (12.0, 24.0), (600, 600))


def test_noise_of_a_step() -> None:
    """s^2 = c (B / base - 1) = 0.5 (160 / 32 - 1) = 2; eta / (1 + t)^0.55 with t = 31: 2^-2.75."""
    r = recipe("batch.size=160", "optim.base_batch=32", "recipe.sample_noise=0.5", "recipe.gradient_noise=0.01")
    h = r.at(Progress(1000, 10000, step=31, samples=31 * 160))
    assert h.sample_noise == pytest.approx(math.sqrt(2))
    assert h.noise == pytest.approx(0.01 * 2**-2.75)
    assert recipe().at(Progress(1000, 10000)).noise == recipe().at(Progress(1000, 10000)).sample_noise == 0


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (GOYAL, "lr 0.1 x 8192/256 = 3.2 after 5 warm-up epochs (linear scaling, from 0.1), then x 0.1 at epochs 30, 60, 80"),
        ([], "lr 0.02"),
        (["recipe.warmup_epochs=1", "recipe.schedule=cosine"], "lr 0.02 after 1 warm-up epoch (from 0), then cosine to 0"),
        (["recipe.scale=sqrt", "optim.base_batch=16", "recipe.warmup_steps=9", "recipe.warmup=constant"],
         "lr 0.02 x sqrt(64/16) = 0.04 after 9 warm-up steps (sqrt scaling, all at 0.02)"),
        (["recipe.schedule=polynomial", "recipe.end_lr=1e-4"], "lr 0.02, then polynomial of power 2 to 0.0001"),
        (["recipe.chain=[{epochs: 3},{kind: exponential, scale: 0.5}]"],
         "lr 0.02, then constant for 3 epochs, then x 0.1 in each epoch from x 0.5"),
        (["recipe.growth=milestones", "recipe.grow_at=[2,3.5]", "recipe.grow_to=[512,128]"],
         "lr 0.02; follows the batch (linear): 0.16 from epoch 2, 0.04 from epoch 3.5"),
        (["recipe.schedule=steps", "recipe.milestones=[4]", "recipe.growth=decays", "recipe.batch_max=128"],
         "lr 0.02, then x 0.1 at epochs 4, replaced by batch growth up to 128"),
        (["optim.base_batch=32", "recipe.scale=none", "recipe.adapt_regime=true", "recipe.schedule=steps", "recipe.milestones=[4]"],
         "lr 0.02, then x 0.1 at epochs 8; regime adapted: 2 times the epochs"),
    ],
)  # fmt: skip
def test_lr_summary(words: list[str], line: str) -> None:
    assert lr_summary(configured(*words), 50000) == line


def test_batch_summary() -> None:
    words = ["recipe.growth=milestones", "recipe.grow_at=[1,2.5]", "recipe.grow_to=[128,256]"]
    assert batch_summary(recipe(*words)) == "64, 128 from epoch 1, 256 from epoch 2.5"
    assert batch_summary(recipe()) == "64"


STEPS = ["recipe.schedule=steps", "recipe.milestones=[1]"]


@pytest.mark.parametrize(
    ("words", "what", "key"),
    [
        (["recipe.warmup_epochs=1", "recipe.warmup_steps=2"],
         "recipe.warmup_epochs=1 and recipe.warmup_steps=2 both set the warm-up's length", "recipe.warmup_steps"),
        (["recipe.schedule=steps"], "recipe.schedule=steps needs recipe.milestones", "recipe.schedule"),
        (["recipe.milestones=[3]"], "recipe.milestones needs recipe.schedule=steps; it is constant", "recipe.milestones"),
        (["recipe.schedule=steps", "recipe.milestones=[3,3]"], "recipe.milestones is [3.0, 3.0]", "recipe.milestones"),
        (["recipe.schedule=steps", "recipe.milestones=[0]"], "recipe.milestones is [0.0]", "recipe.milestones"),
        (["recipe.schedule=cosine", "recipe.chain=[{epochs: 1}]"],
         "recipe.chain and recipe.schedule=cosine both set the schedule", "recipe.chain"),
        (["recipe.chain=[{kind: cosine},{kind: constant}]"],
         "recipe.chain[0] has no epochs, which only the last piece may leave out", "recipe.chain"),
        (["recipe.chain=[{epochs: 0},{kind: constant}]"], "recipe.chain[0].epochs is 0", "recipe.chain"),
        (["recipe.chain=[{kind: steps}]"], "recipe.chain[0] is of kind steps without milestones", "recipe.chain"),
        (["recipe.schedule=steps", "recipe.milestones=[.nan]"], "recipe.milestones[0] is nan", "recipe.milestones"),
        (["recipe.growth=milestones", "recipe.grow_at=[.inf]", "recipe.grow_to=[9]"], "recipe.grow_at[0] is inf", "recipe.grow_at"),
        (["recipe.chain=[{milestones: [1]}]"], "recipe.chain[0] is of kind constant with milestones", "recipe.chain"),
        (["recipe.chain=[{scale: .nan}]"], "recipe.chain[0].scale is nan", "recipe.chain"),
        (["recipe.chain=[{kind: exponential, gamma: -0.5}]"], "recipe.chain[0].gamma is -0.5", "recipe.chain"),
        (["recipe.chain=[{kind: polynomial, power: -1}]"], "recipe.chain[0].power is -1", "recipe.chain"),
        (["recipe.chain=[{kind: cosine, end_lr: .nan}]"], "recipe.chain[0].end_lr is nan", "recipe.chain"),
        (["recipe.schedule=exponential", "recipe.gamma=1000", "epochs=200"],
         "the learning rate grows beyond the largest float", "recipe.gamma"),
        (["recipe.chain=[{epochs: 10},{kind: cosine}]"], "recipe.chain's last piece begins at epoch 10 of 10", "recipe.chain"),
        (["recipe.growth=decays", "recipe.batch_max=80"],
         "recipe.growth=decays needs recipe.schedule=steps; it is constant", "recipe.growth"),
        ([*STEPS, "recipe.growth=decays", "recipe.batch_max=80", "recipe.gamma=1"],
         "recipe.growth=decays needs recipe.gamma between 0 and 1; it is 1", "recipe.gamma"),
        ([*STEPS, "recipe.growth=decays"], "recipe.growth=decays needs recipe.batch_max of batch.size=64 or more", "recipe.batch_max"),
        ([*STEPS, "recipe.batch_max=80"], "recipe.batch_max needs recipe.growth=decays; it is none", "recipe.batch_max"),
        ([*STEPS, "recipe.growth=decays", "recipe.batch_max=1001"], "batch 640 is more than the 500 training samples", "recipe.batch_max"),
        (["recipe.growth=milestones", "recipe.grow_at=[1]"], "recipe.grow_at has 1 epochs, recipe.grow_to 0 batches", "recipe.grow_to"),
        (["recipe.growth=milestones", "recipe.grow_at=[1]", "recipe.grow_to=[0]"], "recipe.grow_to is [0]", "recipe.grow_to"),
        (["recipe.growth=milestones", "recipe.grow_at=[1]", "recipe.grow_to=[501]"], "batch 501 is more than the 500", "recipe.grow_to"),
        (["recipe.grow_at=[1]"], "recipe.grow_at and recipe.grow_to need recipe.growth=milestones; it is none", "recipe.grow_at"),
        (["recipe.adapt_regime=true"],
         "recipe.adapt_regime and recipe.sample_noise compare the batch with optim.base_batch", "optim.base_batch"),
        (["recipe.sample_noise=1"],
         "recipe.adapt_regime and recipe.sample_noise compare the batch with optim.base_batch", "optim.base_batch"),
        (["recipe.warmup_epochs=10", "recipe.schedule=cosine"], "a warm-up of 10 epochs leaves nothing", "recipe.warmup_epochs"),
        (["batch.size=501"], "batch 501 is more than the 500 training samples", "batch.size"),
    ],
)  # fmt: skip
def test_recipe_errors_name_their_key(words: list[str], what: str, key: str) -> None:
    with pytest.raises(UserError) as caught:
        recipe(*words, dataset=500)
    assert what in caught.value.what
    assert caught.value.where.startswith(key)
    assert caught.value.fix
