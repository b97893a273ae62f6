"""Language models of transformers: adapters of Conv1D, packed rows, masks of padding, with the
library's own modules as the reference."""

from __future__ import annotations

import copy
import json
import re
import shutil
from pathlib import Path
from typing import Any, ClassVar

import language_models_on_ranks
import numpy as np
import pytest
import torch
from language_models_on_ranks import JOBS, LORA, SAMPLE, SEQUENCES, VOCABULARY, train
from pool import alone
from ranks import mpirun, needs_extra, needs_mpirun
from safetensors.numpy import load_file
from torch.nn import functional

import hvdtrain
from hvdtrain.__main__ import main
from hvdtrain.core.adapters import is_adapter, merged
from hvdtrain.core.import_torchvision import define_missing_operators
from hvdtrain.core.progress import fold
from hvdtrain.data.source import NamedArrays
from hvdtrain.errors import UserError
from hvdtrain.extras.pretrained.load import read_weights

define_missing_operators()  # transformers imports torchvision
transformers: Any = pytest.importorskip(
    "transformers", reason="transformers is not installed: make test-keras"
)

WORDS = ["task.name=language", *language_models_on_ranks.WORDS]
TOKENS = np.random.default_rng(1).integers(0, VOCABULARY, (24, 13))
DATA = NamedArrays({"tokens": TOKENS}, {"tokens": VOCABULARY})


@pytest.fixture(autouse=True)
def quiet() -> None:
    transformers.utils.logging.disable_progress_bar()


def gpt2() -> Any:
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 16, "vocab_size": VOCABULARY}
    no_dropout = {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **no_dropout, **ends))


SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 24,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def llama() -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, num_key_value_heads=1))


def mistral() -> Any:
    """Each token sees three tokens before it."""
    config = transformers.MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=4)
    return transformers.MistralForCausalLM(config)


def bert() -> Any:
    dropouts = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return transformers.BertForSequenceClassification(
        transformers.BertConfig(**SIZES, **dropouts, num_labels=3)
    )


def saved(model: Any, folder: Path) -> Path:
    """A folder of save_pretrained(), whose weights are those of no constructor."""
    torch.manual_seed(7)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn_like(p))
    model.save_pretrained(folder)
    return folder


def loaded(folder: Path, kind: str = "AutoModelForCausalLM", **options: Any) -> Any:
    options |= {"dtype": torch.float64}
    return getattr(transformers, kind).from_pretrained(folder, **options).eval()


def test_adapters_of_conv1d_train_as_their_formula(tmp_path: Path) -> None:
    """W + 2 A B by torch's own gradient, with the model of the library; a job begins with the sum,
    or trains the adapters further.

    PEFT with the same adapters and fan_in_fan_out=True gave the same numbers to 3e-17.
    """
    folder = saved(gpt2(), tmp_path / "folder")
    words = [*WORDS, f"model.name=transformers:{folder}", "batch.size=24"]
    trained = [*words, *LORA, f"model.weights={folder}"]
    first, last = (
        hvdtrain.train(
            {"run": str(tmp_path / f"{steps}"), "stop.steps": steps},
            *trained,
            train_data=DATA,
            val_data=DATA,
        ).weights
        for steps in (1, 5)
    )
    model = loaded(folder)
    adapters = {
        # B is zero in the first step, so that A does not move
        name: torch.tensor(array if name.endswith("A") else 0 * array, requires_grad=True)
        for name, array in first.items()
        if is_adapter(name)
    }
    assert len(adapters) == 16
    weights = dict(model.named_parameters())
    tokens = torch.from_numpy(TOKENS)

    def whole() -> dict[str, torch.Tensor]:
        layers = [name.removesuffix(".lora_A") for name in adapters if name.endswith(".lora_A")]
        return weights | {
            f"{layer}.weight": weights[f"{layer}.weight"]
            + 2 * adapters[f"{layer}.lora_A"] @ adapters[f"{layer}.lora_B"]
            for layer in layers
        }

    for _ in range(5):
        logits = torch.func.functional_call(model, whole(), (tokens[:, :-1],)).logits
        functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        with torch.no_grad():
            for p in adapters.values():
                assert p.grad is not None
                p.sub_(0.5 * p.grad)
                p.grad = None
    for name, p in adapters.items():
        np.testing.assert_allclose(last[name], p.detach().numpy(), rtol=0, atol=1e-14, err_msg=name)
    assert max(np.abs(array).max() for name, array in last.items() if name.endswith("B")) > 0.01
    expected = {name: p.detach().numpy() for name, p in whole().items()}
    of_run = merged(last, 2.0)
    for begun, same in ((words, expected), ([*words, *LORA], last)):
        run = hvdtrain.train(
            {"run": str(tmp_path / f"{len(begun)}"), "stop.steps": 1, "optim.base_lr": 0},
            *(word for word in begun if not word.startswith("optim.base_lr")),
            f"model.weights={tmp_path / '5'}",
            train_data=DATA,
            val_data=DATA,
        )
        assert set(same) <= run.weights.keys()
        for name, array in same.items():
            np.testing.assert_allclose(run.weights[name], array, rtol=0, atol=1e-14, err_msg=name)
    for name, array in expected.items():
        np.testing.assert_allclose(of_run[name], array, rtol=0, atol=1e-14, err_msg=name)
    for wrong, what in (
        ("model.lora_rank=32", "too large for a layer of 32 inputs and 32 outputs"),
        ("model.lora=['c_attn']", "'?c_attn'? matches no torch.nn.Linear or Conv1D of the model"),
    ):
        with pytest.raises(UserError, match=what):
            hvdtrain.train(
                {"run": str(tmp_path / "wrong")}, *trained, wrong, train_data=DATA, val_data=DATA
            )


@pytest.fixture
def in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms and softmax without the library's rounding to float32, which makes bits depend on the
    shape of a batch."""
    softmax = functional.softmax

    def exact_softmax(x: torch.Tensor, dim: int, dtype: Any = None) -> torch.Tensor:
        return softmax(x, dim)

    def norm(self: Any, x: torch.Tensor) -> torch.Tensor:
        root = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * (x * root)

    monkeypatch.setattr(functional, "softmax", exact_softmax)
    models = transformers.models
    monkeypatch.setattr(models.llama.modeling_llama.LlamaRMSNorm, "forward", norm)
    monkeypatch.setattr(models.mistral.modeling_mistral.MistralRMSNorm, "forward", norm)


def losses_alone(model: Any) -> torch.Tensor:
    """The mean loss of all predicted tokens, of one sequence after the other."""
    losses = []
    for sequence in SEQUENCES:
        tokens = torch.from_numpy(sequence)
        losses.append(
            functional.cross_entropy(
                model(tokens[None, :-1]).logits[0], tokens[1:], reduction="sum"
            )
        )
    return torch.stack(losses).sum() / sum(len(sequence) - 1 for sequence in SEQUENCES)


@needs_extra("packing")
@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("make", [gpt2, llama, mistral])
def test_packed_rows_are_each_sequence_alone(make: Any, attention: str, tmp_path: Path) -> None:
    """The gradient of a step over all rows, and the loss after it."""
    folder = saved(make(), tmp_path / "folder")
    run = hvdtrain.train(
        {"run": str(tmp_path / "run"), "stop.steps": 1, "model.name": f"transformers:{folder}"},
        *WORDS,
        *(f"model.weights={folder}", f"model.attn_implementation={attention}"),
        *("data.pack=17", "batch.size=8"),
        train_data={"tokens": SEQUENCES},
        val_data={"tokens": SEQUENCES},
    )
    model = loaded(folder, attn_implementation=attention)
    losses_alone(model).backward()
    with torch.no_grad():
        for name, p in model.named_parameters():
            assert p.grad is not None
            p.sub_(0.5 * p.grad)
            np.testing.assert_allclose(run.weights[name], p, rtol=0, atol=1e-14, err_msg=name)
        assert run.last == pytest.approx(losses_alone(model).item(), rel=0, abs=1e-13)


def opt() -> Any:
    """Counts positions itself."""
    sizes = {**SIZES, "ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0}
    return transformers.OPTForCausalLM(transformers.OPTConfig(**sizes))


def lfm2() -> Any:
    """Has a convolution over tokens."""
    sizes = {**SIZES, "num_key_value_heads": 2, "layer_types": ["conv", "full_attention"]}
    return transformers.Lfm2ForCausalLM(transformers.Lfm2Config(**sizes))


def mamba() -> Any:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": VOCABULARY, "state_size": 4}
    return transformers.MambaForCausalLM(transformers.MambaConfig(**sizes))


class Mixing(transformers.GPT2LMHeadModel):  # type: ignore[misc]
    """Keeps the sequences of one row apart, as flash attention."""

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, **more: Any) -> Any:
        is_one = len(input_ids) == 1
        return super().forward(input_ids, position_ids=position_ids if is_one else None, **more)


def mixing() -> Any:
    return Mixing(gpt2().config)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (mixing, "Mixing of transformers: the tokens of a sequence change the outputs"),
        (opt, "OPTForCausalLM of transformers: the tokens of a sequence change the outputs"),
        (lfm2, "Lfm2ForCausalLM of transformers: the tokens of a sequence change the outputs"),
        (mamba, "MambaForCausalLM of transformers: its forward.. has no parameter position_ids"),
    ],
)
@needs_extra("packing")
def test_models_that_cannot_keep_sequences_apart(make: Any, why: str, tmp_path: Path) -> None:
    data = {"tokens": SEQUENCES}
    words = [word for word in WORDS if not word.startswith("speed.")]  # in float32
    with pytest.raises(UserError, match=f"data.pack does not support {why}") as caught:
        hvdtrain.train(
            {"run": str(tmp_path / "run")},
            *words,
            *("data.pack=17", "batch.size=8"),
            model=make(),
            train_data=data,
            val_data=data,
        )
    assert caught.value.fix == "data.pad={tokens: 0} instead of data.pack"


class ByHand(torch.nn.Module):
    """Has a parameter for the mask of padding."""

    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(VOCABULARY, 4)
        self.out = torch.nn.Linear(4, 3)

    def forward(self, ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        assert attention_mask.dtype == torch.bool
        total = (self.words(ids) * attention_mask[:, :, None]).sum(1)
        mean: torch.Tensor = self.out(total / attention_mask.sum(1, keepdim=True))
        return mean


class Next(torch.nn.Module):
    """Predicts tokens; how it was called is in `masks`."""

    masks: ClassVar[list[torch.Tensor | None]] = []

    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(VOCABULARY, VOCABULARY)

    def forward(
        self, tokens: torch.Tensor, attention_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        self.masks.append(attention_mask)
        logits: torch.Tensor = self.words(tokens)
        return logits


@needs_extra("export")
@needs_extra("trained_models")
@pytest.mark.parametrize("way", ["sdpa", "eager", "object", "user"])
def test_padding_is_masked_by_name(way: str, tmp_path: Path) -> None:
    """The gradient of a step and the outputs after it are those of each sequence alone."""
    data = {"x": SEQUENCES, "y": np.arange(len(SEQUENCES)) % 3}
    words = [word for word in WORDS if word != "task.name=language"]
    words += ["data.pad={x: 0}", "batch.size=15", "batch.micro=5"]
    model: Any = ByHand().double()
    job: dict[str, Any] = {"model": copy.deepcopy(model)}
    if way != "user":
        folder = saved(bert(), tmp_path / "folder")
        kind = "AutoModelForSequenceClassification"
        attention = "sdpa" if way == "object" else way
        model = loaded(folder, kind, attn_implementation=attention)
        job = {"model": loaded(folder, kind)}
        if way != "object":
            words += [f"model.name=transformers:{folder}", f"model.weights={folder}"]
            words += [f"model.attn_implementation={way}"]
            job = {}
    run = hvdtrain.train(
        {"run": str(tmp_path / "run"), "stop.steps": 1},
        *words,
        **job,
        train_data=data,
        val_data=data,
    )

    def outputs_of(sequence: np.ndarray) -> torch.Tensor:
        tokens = torch.from_numpy(sequence)[None]
        outputs = model(tokens, torch.ones_like(tokens, dtype=torch.bool))
        logits: torch.Tensor = outputs if way == "user" else outputs.logits
        return logits

    for sequence, label in zip(SEQUENCES, data["y"], strict=True):
        (functional.cross_entropy(outputs_of(sequence), torch.tensor([label])) / 15).backward()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.grad is not None:
                p.sub_(0.5 * p.grad)
            np.testing.assert_allclose(run.weights[name], p, rtol=0, atol=1e-14, err_msg=name)
        expected = torch.cat([outputs_of(sequence) for sequence in SEQUENCES]).numpy()
    np.testing.assert_allclose(hvdtrain.predict(run, SEQUENCES), expected, rtol=0, atol=1e-13)
    if way == "sdpa":  # without the data of the script
        name = f"model.name=transformers:{tmp_path / 'folder'}"
        assert main(["export", str(run.folder), "--to", str(tmp_path / "out"), name]) == 0
        state = loaded(tmp_path / "out", "AutoModelForSequenceClassification").state_dict()
        assert all(np.array_equal(x.numpy(), run.weights[key]) for key, x in state.items())


@needs_extra("trained_models")
@pytest.mark.parametrize("make", [gpt2, llama])
def test_the_last_token_before_padding_is_classified(
    make: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever token config.json pads with, the outputs are those of each sequence alone."""
    config = copy.deepcopy(make().config)
    config.num_labels = 3
    config.pad_token_id = 7 if make is gpt2 else None
    kind = f"{make.__name__.replace('gpt', 'GPT').replace('ll', 'Ll')}ForSequenceClassification"
    folder = saved(getattr(transformers, kind)(config), tmp_path / "folder")
    sequences = [np.where(sequence == 0, 1, sequence) for sequence in SEQUENCES]
    data = {"x": sequences, "y": np.arange(len(sequences)) % 3}
    run = hvdtrain.train(
        {"run": str(tmp_path / "run"), "stop.steps": 1, "model.name": f"transformers:{folder}"},
        *(word for word in WORDS if word != "task.name=language"),
        *(f"model.weights={folder}", "data.pad={x: 0}", "batch.size=15"),
        train_data=data,
        val_data=data,
    )
    assert f"pad_token_id of {kind} is 0, the token of padding" in capsys.readouterr().out
    model = loaded(folder, kind)
    model.load_state_dict({name: torch.from_numpy(array) for name, array in run.weights.items()})
    model.config.pad_token_id = None
    with torch.no_grad():
        expected = [model(torch.from_numpy(one)[None]).logits.numpy() for one in sequences]
    np.testing.assert_allclose(
        hvdtrain.predict(run, sequences), np.concatenate(expected), rtol=0, atol=1e-6
    )


def test_a_language_model_gets_the_mask_if_it_has_the_parameter(tmp_path: Path) -> None:
    data = {"tokens": SEQUENCES}
    hvdtrain.train(
        {"run": str(tmp_path / "run"), "stop.steps": 1},
        *WORDS,
        *("data.pad={tokens: 0}", "batch.size=15"),
        model=Next(),
        train_data=data,
        val_data=data,
    )
    # the last of 16 tokens is only predicted
    masks = [mask for mask in Next.masks if mask is not None and len(mask) == 15]
    real = sorted(min(len(sequence), 15) for sequence in SEQUENCES)
    assert None not in Next.masks and len(masks) >= 2
    assert all(sorted(mask.sum(1).tolist()) == real for mask in masks)
    Next.masks.clear()


@needs_mpirun
def test_the_same_on_two_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where each has parts of the weights: adapters in packed rows, and texts that are drawn; and
    padded batches, resumed."""
    for make in (gpt2, bert):
        saved(make(), tmp_path / make.__name__)
    for split in ("train", "val"):
        (tmp_path / f"{split}.txt").write_text("the cat sat on the mat\n" * 20)
    done = mpirun(2, alone("language_models_on_ranks:jobs", str(tmp_path)))
    assert done.returncode == 0, done.stdout + done.stderr
    for number in range(len(JOBS)):
        one = tmp_path / f"one{number}"
        expected = train(tmp_path, number, one, 4, "shard.stage=0").weights
        found = read_weights(tmp_path / f"{number}", "")[0]
        assert found.keys() == expected.keys()
        for key, array in found.items():
            np.testing.assert_allclose(array, expected[key], rtol=0, atol=1e-13, err_msg=key)
    capsys.readouterr()
    name = f"model.name=transformers:{tmp_path / 'gpt2'}"
    assert main([*SAMPLE, str(tmp_path / "text"), name]) == 0
    texts = capsys.readouterr().out.partition("--- 1\n")[2]
    assert texts.count("the ") >= 3
    assert done.stdout.rpartition("--- 1\n")[2].startswith(texts)


def trained_text_run(folder: Path, words: list[str]) -> Path:
    """A run of GPT-2 on a text, whose lines end texts."""
    for split in ("train", "val"):
        (folder / f"{split}.txt").write_text("the cat sat on the mat\n" * 30)
    config = gpt2().config
    config.vocab_size, config.n_positions, config.eos_token_id = 256, 40, 10
    saved(transformers.GPT2LMHeadModel(config), folder / "gpt2")
    job = ["data.name=text", f"data.root={folder}", "data.context=24", "stop.steps=8"]
    job += ["optim.name=adamw", "optim.base_lr=0.02", "batch.size=8", "log.display=lines"]
    name = f"model.name=transformers:{folder / 'gpt2'}"
    assert main(["task.name=language", name, *job, *words, f"run={folder / 'run'}"]) == 0
    return folder / "run"


def by_definition(model: Any, prompt: bytes, row: int, most: int, top_k: int, seed: int) -> bytes:
    """The whole text is read for every token."""
    tokens = list(prompt)
    while len(tokens) < most:
        with torch.no_grad():
            logits = model(torch.tensor([tokens])).logits[0, -1].double().numpy() / 0.7
        shares = np.exp(logits - logits.max())
        shares[np.argsort(-logits)[top_k:]] = 0
        u = (fold(seed, 0x73616D70, row, len(tokens)) >> 11) / 2**53
        token = int(np.searchsorted(np.cumsum(shares / shares.sum()), u, side="right"))
        if token == 10:  # the end of a text
            break
        tokens.append(token)
    return bytes(tokens)


@needs_extra("export")
@needs_extra("sample")
def test_texts_of_generate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each text is by the definition, and ends at the end token; at temperature 0 as generate()
    says. A folder that `export` has written gives the same."""
    run = trained_text_run(tmp_path, ["log.samples=2"])
    assert len(list((run / "samples").iterdir())) == 4
    name = f"model.name=transformers:{tmp_path / 'gpt2'}"
    assert main(["export", str(run), "--to", str(tmp_path / "out"), name]) == 0
    assert "GPT2LMHeadModel.from_pretrained(" in capsys.readouterr().out
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert model.config.use_cache and model.dtype == torch.float32
    weights = read_weights(run, "")[0]
    assert all(np.array_equal(weights[key], x.numpy()) for key, x in model.state_dict().items())

    def sampled(*words: str) -> list[bytes]:
        assert main(["sample", str(run), "--prompt", "the ", "--count", "3", *words, name]) == 0
        _, *texts = re.split(r"--- \d\n", capsys.readouterr().out)
        return [text.removesuffix("\n").encode() for text in texts]

    options = ["--temperature", "0.7", "--top-k", "3", "--seed", "4"]
    expected = [by_definition(model, b"the ", row, 41, 3, 4) for row in range(3)]
    assert sampled(*options) == expected and len({*expected}) == 3
    assert sampled(*options, "batch.evaluate=1", "--length", "9") == [
        text[:13] for text in expected
    ]
    prompt = torch.tensor([list(b"the ")])
    found = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        max_length=41,
        pad_token_id=10,
    )
    greedy = bytes(found[0].tolist()).partition(b"\n")[0]
    assert sampled("--temperature", "0") == [greedy] * 3
    assert main(["sample", str(run), "--length", "41", name]) == 2
    assert "GPT2LMHeadModel has positions for 40 tokens" in capsys.readouterr().err
    for words, what in (
        (["--to", str(tmp_path / "out"), name], "out exists already"),
        (["--to", str(tmp_path), name], "which no export has written"),
        (["--to", str(tmp_path / "new"), name, "--adapters", "merged"], "has no adapters"),
        (["--to", str(tmp_path / "new")], "only the run folder names it"),
    ):
        assert main(["export", str(run), *words]) == 2
        assert what in capsys.readouterr().err
    assert main(["export", str(run), "--to", str(tmp_path / "out"), name, "--force"]) == 0
    files = {path.name for path in (tmp_path / "out").iterdir()}
    written = {"config.json", "generation_config.json", "model.safetensors"}
    assert files == {*written, "hvdtrain.json"}
    (tmp_path / "thesis" / "base").mkdir(parents=True)
    (tmp_path / "thesis" / "base" / "thesis.txt").touch()
    shutil.copytree(tmp_path / "out", tmp_path / "download")
    (tmp_path / "download" / "hvdtrain.json").unlink()
    for to, more, what in (
        ("thesis", [], "has base/thesis.txt, which no export has written"),
        ("download", [], "has files, but no hvdtrain.json of an export"),
        ("gpt2", [], "--force never replaces an input"),
        ("out", [f"model.weights={tmp_path / 'out' / 'model.safetensors'}"], "replaces an input"),
    ):
        assert main(["export", str(run), "--to", str(tmp_path / to), name, "--force", *more]) == 2
        assert what in capsys.readouterr().err
    assert (tmp_path / "thesis" / "base" / "thesis.txt").exists()


@needs_extra("export")
def test_exported_adapters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Merged, the folder is the model of the run. Separate, W + 2 B A of PEFT's files is the same,
    and norms that are trained besides are whole.

    PeftModel.from_pretrained() of PEFT gave the same logits to 1e-15, from both base folders.
    """
    words = [*LORA, "speed.precision=fp64", "model.lora_train=['*ln_f*']"]
    of_folder = f"model.weights={tmp_path / 'gpt2'}"
    name = f"model.name=transformers:{tmp_path / 'gpt2'}"
    for base in (tmp_path / "gpt2", tmp_path / "separate" / "base"):
        is_of_folder = base.name == "gpt2"
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        run = trained_text_run(tmp_path, [*words, *[of_folder] * is_of_folder])
        export = ["export", str(run), name, "--force", "--to"]
        assert main([*export, str(tmp_path / "merged"), "--adapters", "merged"]) == 0
        assert main([*export, str(tmp_path / "separate"), "--adapters", "separate"]) == 0
        assert f"PeftModel.from_pretrained(base, '{tmp_path / 'separate'}')" in (
            capsys.readouterr().out
        )
        expected = merged(read_weights(run, "")[0], 2.0)
        state = loaded(tmp_path / "merged").state_dict()
        assert all(np.array_equal(x.numpy(), expected[key]) for key, x in state.items())
        config = json.loads((tmp_path / "separate" / "adapter_config.json").read_text())
        assert config["base_model_name_or_path"] == str(base)
        assert config["lora_alpha"] / config["r"] == 2 and config["fan_in_fan_out"]
        assert config["modules_to_save"] == ["transformer.ln_f"]
        weights = load_file(tmp_path / "separate" / "adapter_model.safetensors")
        found = {key: x.numpy() for key, x in loaded(base).state_dict().items()}
        for layer in config["target_modules"]:
            a, b = (
                weights.pop(f"base_model.model.{layer}.lora_{of}.weight").astype(np.float64)
                for of in "AB"
            )
            found[f"{layer}.weight"] = found[f"{layer}.weight"] + 2 * (b @ a).T
        found |= {key.removeprefix("base_model.model."): x for key, x in weights.items()}
        assert len(weights) == 2 and found.keys() == expected.keys()
        for key, array in found.items():
            np.testing.assert_allclose(array, expected[key], rtol=0, atol=1e-15, err_msg=key)
    for wrong, what in (
        ([], "--adapters merged writes the whole model, --adapters separate only the adapters"),
        (["--merged", "--adapters", "separate"], "contradict each other"),
    ):
        assert main([*export, str(tmp_path / "new"), *wrong]) == 2
        assert what in capsys.readouterr().err
    file = ["export", str(run), "--to", str(tmp_path / "m.safetensors"), "--adapters", "separate"]
    assert main(file) == 2
    assert "--adapters separate writes a folder for PEFT" in capsys.readouterr().err
