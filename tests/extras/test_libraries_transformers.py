"""model.name=transformers:FOLDER and weights of save_pretrained(): outputs are the library's own,
whatever the names in its files."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pool import alone
from pretrained_on_ranks import LIBRARY
from ranks import HIGHEST_STAGE, mpirun, needs_extra, needs_mpirun
from safetensors import safe_open
from safetensors.numpy import save_file

import hvdtrain
from hvdtrain.core.import_torchvision import define_missing_operators
from hvdtrain.data.source import NamedArrays
from hvdtrain.errors import UserError
from hvdtrain.extras.libraries.config_json import read_config
from hvdtrain.extras.libraries.transformers import model_of
from hvdtrain.extras.pretrained.load import read_weights

pytestmark = pytest.mark.in_turn

define_missing_operators()  # transformers imports torchvision
transformers: Any = pytest.importorskip(
    "transformers", reason="transformers is not installed: make test-keras"
)

WORDS = [
    "batch.size=12",
    "optim.name=sgd",
    "optim.base_lr=0",
    "speed.precision=fp64",
    "log.display=lines",
]


def vit(**more: int) -> Any:
    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 24,
        "image_size": 16,
        "patch_size": 8,
    }
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(**{**sizes, **more}, num_labels=10)
    )


def gpt2() -> Any:
    sizes = {
        "n_layer": 2,
        "n_head": 2,
        "n_embd": 16,
        "vocab_size": 20,
        "n_positions": 12,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))


def bert() -> Any:
    sizes = {
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "hidden_size": 16,
        "intermediate_size": 32,
        "vocab_size": 20,
    }
    return transformers.BertForSequenceClassification(
        transformers.BertConfig(**sizes, max_position_embeddings=12, num_labels=3)
    )


IMAGES = np.random.default_rng(0).integers(0, 256, (12, 16, 16, 3), np.uint8)
TOKENS = np.random.default_rng(1).integers(0, 20, (12, 9))
DATA = {
    vit: {"x": IMAGES, "y": np.arange(12) % 10},
    gpt2: NamedArrays({"tokens": TOKENS}, {"tokens": 20}),
    bert: {"x": TOKENS, "y": np.arange(12) % 3},
}


@pytest.fixture(autouse=True)
def quiet() -> None:
    transformers.utils.logging.disable_progress_bar()


def saved(make: Any, folder: Path) -> Path:
    """A folder of save_pretrained(), whose weights are those of no constructor."""
    torch.manual_seed(7)
    model = make()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn_like(p))
    model.save_pretrained(folder)
    return folder


def train(run: Path, words: list[str], data: Any) -> Any:
    return hvdtrain.train(
        {"run": str(run), "stop.steps": 1}, *WORDS, *words, train_data=data, val_data=data
    )


@needs_extra("trained_models")
@pytest.mark.parametrize("make", [vit, gpt2, bert])
def test_outputs_are_those_of_the_library(
    make: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the class that wrote the folder, of stage 3, and of one made anew from the file in it."""
    folder = saved(make, tmp_path / "folder")
    data = DATA[make]
    expected = type(make()).from_pretrained(folder, dtype=torch.float64).eval()
    arrays = len(dict(expected.named_parameters()))
    ways = [
        [f"model.name=transformers:{folder}", f"model.weights={folder}"],
        [f"model.name=transformers:{folder}", f"model.weights={folder}", HIGHEST_STAGE],
        [
            f"model.name=transformers:{type(expected).__name__}",
            f"model.config={folder}",
            f"model.weights={folder / 'model.safetensors'}",
        ],
    ]
    more = ["task.name=language"] if make is gpt2 else []
    for number, way in enumerate(ways):
        run = train(tmp_path / f"{number}", [*way, *more], data)
        inputs = (
            run.transform(IMAGES).astype(np.float64)
            if make is vit
            else TOKENS[:, :-1]
            if make is gpt2
            else TOKENS
        )
        with torch.no_grad():
            found = expected(torch.from_numpy(inputs)).logits.numpy()
        np.testing.assert_allclose(
            hvdtrain.predict(run, TOKENS if make is not vit else IMAGES), found, rtol=0, atol=1e-12
        )
        said = capsys.readouterr().out
        assert (
            f"{arrays} of {arrays} arrays are loaded" in said
            and "left as they begin" not in said
            and "are not of the model" not in said
        )


def test_names_of_the_file_are_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What the library renames; what is missing, left over or of another shape; names that the user
    changes."""
    folder = saved(vit, tmp_path / "folder")
    data = DATA[vit]
    with safe_open(folder / "model.safetensors", "numpy") as file:
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    names = vit().state_dict().keys()
    assert len(names & weights.keys()) < len(names) / 2, (
        "transformers writes the names that it has: nothing is left to test here"
    )
    name = [f"model.name=transformers:{folder}"]
    (folder / "preprocessor_config.json").write_text(
        '{"image_mean": [0.5, 0.5, 0.5], "image_std": [0.25, 0.25, 0.25]}'
    )
    for words, count in (([], 1), (["data.mean=[0.5,0.5,0.5]", "data.std=[0.25,0.25,0.25]"], 0)):
        train(tmp_path / f"stats{count}", [*name, f"model.weights={folder}", *words], data)
        hint = (
            "trained with data.mean=[0.5,0.5,0.5] data.std=[0.25,0.25,0.25], as "
            "preprocessor_config.json says; this job has others"
        )
        assert capsys.readouterr().out.count(hint) == count
    ten = {**data, "y": np.arange(12) % 4}
    with pytest.raises(
        UserError, match=r"classifier.weight is \(10, 16\) in .*, but \(4, 16\) in the model"
    ):
        train(tmp_path / "other", [*name, f"model.weights={folder}"], ten)
    train(
        tmp_path / "new",
        [*name, f"model.weights={folder}", "model.weights_skip=['classifier.*']"],
        ten,
    )
    assert (
        "2 left as they begin, by model.weights_skip: classifier.weight, classifier.bias"
        in capsys.readouterr().out
    )
    changed = {name: array for name, array in weights.items() if "vit.layernorm." not in name} | {
        "other.weight": np.ones(3, np.float32)
    }
    save_file(changed, tmp_path / "w.safetensors")
    run = train(tmp_path / "some", [*name, f"model.weights={tmp_path / 'w.safetensors'}"], data)
    said = capsys.readouterr().out
    assert (
        "2 not in the file: these are left as they begin: vit.layernorm.weight, vit.layernorm.bias"
        in said
    )
    assert "1 of the file are not of the model: other.weight" in said
    expected = transformers.ViTForImageClassification.from_pretrained(
        folder, dtype=torch.float64
    ).state_dict()
    assert all(
        np.array_equal(array, expected[name].numpy())
        for name, array in run.weights.items()
        if "vit.layernorm." not in name
    )


@needs_mpirun
def test_any_number_of_ranks_begins_with_them(tmp_path: Path) -> None:
    """Each rank reads its part of what the library only renames; what is trained is that of one
    process, also where ranks have parts of the weights."""
    folder = saved(lambda: vit(num_channels=1, image_size=8, patch_size=4), tmp_path / "folder")
    done = mpirun(2, alone("pretrained_on_ranks:library_jobs", str(folder)))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("each rank reads a part of them from the file") == 2
    assert "rank 0 sends" not in done.stdout
    words = [*LIBRARY, f"model.name=transformers:{folder}", f"model.weights={folder}"]
    expected = hvdtrain.train({"run": str(tmp_path / "one"), "stop.steps": 5}, *words).weights
    for number in range(2):
        found = read_weights(Path(f"{folder}-{number}"), "")[0]
        assert found.keys() == expected.keys()
        for name, array in found.items():
            np.testing.assert_allclose(array, expected[name], rtol=0, atol=1e-12, err_msg=name)


class Around(torch.nn.Module):
    """A model of the library inside of one of a script."""

    def __init__(self, body: Any) -> None:
        super().__init__()
        self.body = body

    def forward(self, tokens: torch.Tensor) -> Any:
        return self.body(tokens)


class OwnConstructor(transformers.GPT2LMHeadModel):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__(gpt2().config)


def test_a_class_that_the_library_cannot_make(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        *WORDS,
        "task.name=language",
        "model.name=test_libraries_transformers:OwnConstructor",
        f"model.weights={saved(gpt2, tmp_path / 'folder')}",
    ]
    data = {"train_data": DATA[gpt2], "val_data": DATA[gpt2]}
    with pytest.raises(
        UserError, match=r"OwnConstructor.from_pretrained\(\) of transformers fails: TypeError"
    ) as caught:
        hvdtrain.train({"run": str(tmp_path / "run"), "stop.steps": 1}, *words, **data)
    assert "model.weights_names=['=']" in caught.value.fix
    hvdtrain.train(
        {"run": str(tmp_path / "run"), "stop.steps": 1}, *words, "model.weights_names=['=']", **data
    )
    assert "28 of 28 arrays are loaded" in capsys.readouterr().out


@needs_extra("trained_models")
@pytest.mark.parametrize("around", [False, True])
def test_a_model_of_a_script(
    around: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It begins with a folder's weights, and gives no past; inside of another model its names are
    changed by model.weights_names."""
    folder = saved(gpt2, tmp_path / "folder")
    net = gpt2()
    words = [
        *WORDS,
        "task.name=language",
        f"model.weights={folder}",
        *(["model.weights_names=['=body.']"] if around else []),
    ]
    model = Around(net) if around else net
    run = hvdtrain.train(
        {"run": str(tmp_path / "run"), "stop.steps": 1},
        *words,
        model=model,
        train_data=DATA[gpt2],
        val_data=DATA[gpt2],
    )
    assert "28 of 28 arrays are loaded" in capsys.readouterr().out
    expected = transformers.GPT2LMHeadModel.from_pretrained(folder, dtype=torch.float64).eval()
    with torch.no_grad():
        found = expected(torch.from_numpy(TOKENS[:, :-1])).logits.numpy()
    np.testing.assert_allclose(hvdtrain.predict(run, TOKENS), found, rtol=0, atol=1e-12)
    assert net.config.use_cache


def test_options_and_what_is_no_model(tmp_path: Path) -> None:
    folder = saved(bert, tmp_path / "folder")
    data = DATA[bert]
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "config.json").write_text(
        '{"model_type": "x", "auto_map": {"AutoConfig": "evil.Config"}}'
    )
    run = train(
        tmp_path / "run",
        [f"model.name=transformers:{folder}", "model.num_hidden_layers=1"],
        {**data, "y": np.arange(12) % 5},
    )
    assert run.weights["classifier.weight"].shape == (5, 16) and not any(
        ".layer.1." in name for name in run.weights
    )
    for words, what in (
        (
            [f"model.name=transformers:{folder}", "model.trust_remote_code=true"],
            "bert of transformers has no option trust_remote_code",
        ),
        (
            [f"model.name=transformers:{folder}", "model.hidden_dropout_prob=0.5x"],
            "transformers rejects .*'hidden_dropout_prob' with .*'0.5x'",
        ),
        ([f"model.name=transformers:{tmp_path / 'none'}"], "none/config.json does not exist"),
        (
            [f"model.name=transformers:{tmp_path / 'code'}"],
            "transformers does not read .*code/config.json: .*model type `x`",
        ),
        (
            ["model.name=transformers:AutoModelForImageClassification"],
            "needs the folder of its configuration",
        ),
        (
            ["model.name=transformers:AutoModelForImageClassification", f"model.config={folder}"],
            "does not make AutoModelForImageClass",
        ),
        (["model.name=transformers:BertTokenizer", f"model.config={folder}"], "BertTokenizer"),
        (
            [f"model.name=transformers:{folder}", "framework=numpy"],
            "framework=numpy does not support model.name=transformers:",
        ),
    ):
        with pytest.raises(UserError, match=what):
            train(tmp_path / "wrong", words, data)


VIT = {
    "model_type": "vit",
    "architectures": ["ViTForImageClassification"],
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "image_size": 16,
    "patch_size": 8,
}
WRONG = {
    "negative": -3,
    "huge": 10**9,
    "beyond": 10**30,
    "text": "x",
    "null": None,
    "list": ["x"],
    "dict": {"a": 1},
}
TIMM = {"model_type": "timm_wrapper", "architectures": ["TimmWrapperForImageClassification"]}
OF_CODE = "names the class"
FETCHES = "would download a kernel"
CONFIGS: list[tuple[Any, str]] = [
    *(
        ({**VIT, key: value}, "")
        for key in VIT
        if key[-1] != "s" or key.startswith("num")
        for value in WRONG.values()
    ),
    *(
        ({**VIT, "architectures": [name]}, OF_CODE)
        for name in (
            "os",
            "__name__",
            "BertTokenizer",
            "pipeline",
            "AutoModel",
            "PreTrainedModel",
            3,
            {},
        )
    ),
    *(({**VIT, "architectures": names}, OF_CODE) for names in (None, [], "ViTModel", {"a": 1})),
    *(
        ({**VIT, "architectures": [name]}, "does not make")
        for name in ("LlamaForCausalLM", "GPT2LMHeadModel")
    ),
    *(
        ({**VIT, key: "evil/kernel"}, FETCHES)
        for key in ("_attn_implementation", "attn_implementation", "experts_implementation")
    ),
    ({**VIT, "attn_implementation": {"": "evil/kernel"}}, FETCHES),
    ({**VIT, "attn_implementation": "none"}, "does not make"),
    ({**VIT, "quantization_config": {"quant_method": "x"}}, "belongs to quantized weights"),
    ({**VIT, "hidden_act": "os.system"}, "does not make"),
    ({**VIT, "torch_dtype": "os"}, "does not read"),
    ({**VIT, "id2label": [1]}, "does not read"),
    ({**VIT, "id2label": {"x": "y"}}, "does not read"),
    ({**VIT, "num_labels": 10**9}, "num_labels=1000000000 is more than"),
    (
        {**VIT, "num_hidden_layers": 10_000, "num_attention_heads": 1, "hidden_size": 2**20},
        "more than the .* GiB of memory",
    ),
    ({**VIT, "hidden_size": 2**40, "num_attention_heads": 1}, ""),
    ({**VIT, "initializer_range": -1.0}, "does not make"),
    ({**VIT, "initializer_range": float("nan")}, "does not make"),
    ({**TIMM, "architecture": "local-dir:/etc"}, "is not the name of a model of timm"),
    ({**TIMM, "architecture": "hf-hub:evil/x"}, "is not the name of a model of timm"),
    (
        {**TIMM, "architecture": "resnet18", "model_args": {"checkpoint_path": "/etc/passwd"}},
        "names a file or weights",
    ),
    (
        {"model_type": "timm_backbone", "backbone": "hf_hub:evil/x"},
        "is not the name of a model of timm",
    ),
    ({"model_type": "detr", "backbone": "evil/x"}, "is not the name of a model of timm"),
    ({"model_type": "clip", "architectures": ["CLIPModel"], "text_config": 3}, ""),
    (
        {
            "model_type": "clip",
            "architectures": ["CLIPModel"],
            "vision_config": {"hidden_size": "x"},
        },
        "",
    ),
    (
        {"model_type": "bert", "architectures": ["BertModel"], "vocab_size": 10**12},
        "more than the .* GiB of memory",
    ),
    *(({"model_type": kind}, "does not read") for kind in ("nope", 3, None, ["vit"])),
    *(
        (tree, "is not a configuration of a model")
        for tree in ([1], "x", None, 3, {"x": json.loads("[" * 60 + "]" * 60)})
    ),
    *(
        (text, "is not a configuration of a model")
        for text in (b"", b"{", b'{"a": "\xff"}', b"[" * 100_000, b'{"a": 1, "a": 2}', b"\0" * 99)
    ),
]


def test_a_configuration_that_is_wrong(tmp_path: Path) -> None:
    """One message with its file, whatever it says; nothing is allocated, fetched or imported for
    it."""
    file = tmp_path / "config.json"
    for tree, what in CONFIGS:
        file.write_bytes(tree if isinstance(tree, bytes) else json.dumps(tree).encode())
        with pytest.raises(UserError, match=what or "config.json") as caught:
            model_of(str(tmp_path), "model.name")(outputs=10, shape=(16, 16, 3))
            pytest.fail(f"read {file.read_bytes()[:300]!r}")
        assert str(file) in caught.value.what and "Traceback" not in caught.value.what, caught.value
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(UserError, match="config.json: a pipe, not a file"):
        model_of(str(tmp_path), "model.name")()


def test_numbers_that_are_no_layers(tmp_path: Path) -> None:
    """Sizes of blocks, windows without an end, and classes with any name and number are read."""
    tree = {
        "block_size": 16384,
        "vocab_size_per_layer_input": 262_144,
        "window_size": -1,
        "label2id": {"stage depth": 20_000, "backbone": 7, "num_x": -1},
    }
    (tmp_path / "config.json").write_text(json.dumps(tree))
    assert read_config(tmp_path / "config.json", "model.name") == (tree, [])
    for key in ("num_hidden_layers", "n_layer", "encoder_layers", "depths", "stage_num_blocks"):
        (tmp_path / "config.json").write_text(json.dumps({"text_config": {key: [20_000]}}))
        with pytest.raises(UserError, match=f"{key}=20000 is more than 10000"):
            read_config(tmp_path / "config.json", "model.name")


def test_code_of_a_folder_does_not_run_and_nobody_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """auto_map at any depth: a line says that it is ignored, and a class that only it has is not
    found."""
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked"))
    named = {
        "AutoModelForImageClassification": "evil.X",
        "AutoModelForCausalLM": "evil.X",
        "AutoConfig": "evil.X",
        "AutoModel": "evil.X",
    }
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    tower = {**VIT, "auto_map": named}
    for tree in (
        tower,
        {
            "model_type": "vision-text-dual-encoder",
            "architectures": ["VisionTextDualEncoderModel"],
            "vision_config": tower,
        },
    ):
        more = {
            "text_config": {
                "model_type": "bert",
                "hidden_size": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "auto_map": named,
            }
        }
        (tmp_path / "config.json").write_text(
            json.dumps({**tree, **(more if tree is not tower else {})})
        )
        with pytest.warns(
            UserWarning, match="auto_map names code of the folder or of a hub, which does not run"
        ):
            model_of(str(tmp_path), "model.name")(outputs=10, shape=(16, 16, 3))
    (tmp_path / "config.json").write_text(json.dumps(tower))
    with (
        pytest.warns(UserWarning, match="auto_map"),
        pytest.raises(UserError, match="does not make AutoModelForCausalLM"),
    ):
        model_of("AutoModelForCausalLM", "model.name")(config=str(tmp_path))
    for options, what in (
        ({"auto_map": named}, "auto_map names code"),
        ({"attn_implementation": "evil/x"}, FETCHES),
    ):
        with pytest.raises(UserError, match=what):
            model_of("ViTModel", "model.name")(config=str(tmp_path), **options)
    assert not (tmp_path / "ran").exists()
