"""Texts and chats as transformers makes tokens of them: ids, special tokens, and the answers in a
chat."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvdtrain.config.read import configure
from hvdtrain.core.extras import document_files
from hvdtrain.core.import_torchvision import define_missing_operators
from hvdtrain.training.datasets import build_source

pytestmark = [
    pytest.mark.in_turn,
    pytest.mark.skipif(not document_files(), reason="this copy reads no JSON lines"),
]

define_missing_operators()  # transformers imports torchvision
transformers: Any = pytest.importorskip(
    "transformers", reason="transformers is not installed: make test-keras"
)
tokenizers: Any = pytest.importorskip("tokenizers")

CHATS = [
    [
        ("user", "Wie geht's?"),
        ("assistant", "  Gut, danke 🎉"),
        ("user", "Und?"),
        ("assistant", "x"),
    ],
    [("system", "Be brief."), ("user", "1 + 1\n"), ("assistant", "2\n\n")],
    [("user", "<|im_end|> is a token"), ("assistant", "so it is"), ("user", "and ends here")],
]
TEXTS = ["Grüße an  alle", "", "a", "The quick brown fox <|im_end|> jumps." * 9, "\n\t 🎉"]
ENDING = "{{ m['content'] }}<|im_end|>"
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m['role'] + '\\n' }}{% if m['role'] == 'assistant' %}"
    "{% generation %}" + ENDING + "{% endgeneration %}{% else %}" + ENDING + "{% endif %}"
    "{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PLAIN = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
# Llama 2: an answer follows the end of a question; blanks are stripped, and it has no prompt
LLAMA = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ ' ' + m.content | trim + ' ' + "
    "eos_token }}{% else %}{{ bos_token }}[INST] {{ m.content.strip() }} [/INST]{% endif %}"
    "{% endfor %}"
)


def byte_level(folder: Path, template: str) -> Path:
    """GPT-2's kind, which adds nothing to a text."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.post_processor = tokenizers.processors.ByteLevel(trim_offsets=True)
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=special,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    made.train_from_iterator(TEXTS, trainer)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<|im_start|>", eos_token="<|endoftext|>"
    )
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


def word_pieces(folder: Path) -> Path:
    """BERT's kind, which adds [CLS] and [SEP]."""
    made = tokenizers.Tokenizer(tokenizers.models.WordPiece(unk_token="[UNK]"))
    made.normalizer = tokenizers.normalizers.BertNormalizer()
    made.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    made.train_from_iterator(
        TEXTS, tokenizers.trainers.WordPieceTrainer(vocab_size=80, special_tokens=special)
    )
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=made,
        unk_token="[UNK]",
        pad_token="[PAD]",
        cls_token="[CLS]",
        sep_token="[SEP]",
    ).save_pretrained(folder)
    return folder


def read(tmp_path: Path, records: list[Any], tokenizer: Path, *words: str) -> Any:
    path = tmp_path / "train.jsonl"
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    argv = ["data.name=jsonl", f"data.root={path}", f"data.tokenizer={tokenizer}", *words]
    source = build_source(configure(None, argv), "train")
    return source, source.read(np.arange(len(source)))


def chats() -> list[list[dict[str, str]]]:
    return [[{"role": role, "content": text} for role, text in one] for one in CHATS]


@pytest.mark.parametrize(("template", "reference"), [(MARKED, MARKED), (PLAIN, MARKED)])
def test_answers_are_those_of_transformers(template: str, reference: str, tmp_path: Path) -> None:
    """A template without marks has those of the same template with them."""
    folder = byte_level(tmp_path / "folder", template)
    words = ("data.messages=messages", "task.name=language", "task.loss_on=assistant")
    source, batch = read(tmp_path, [{"messages": one} for one in chats()], folder, *words)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    for row, one in enumerate(chats()):
        expected = tokenizer.apply_chat_template(
            one, chat_template=reference, return_dict=True, return_assistant_tokens_mask=True
        )
        length = len(expected["input_ids"])
        assert batch["tokens"][row, :length].tolist() == expected["input_ids"]
        assert batch["tokens_mask"][row].sum() == length
        answers = batch["answers"][row, :length].tolist()
        mask = [bool(one) for one in expected["assistant_masks"]]
        assert answers == mask and any(mask) and not all(mask), (one, template)
    assert source.identity()["tokenizer"]


def test_a_template_without_a_prompt(tmp_path: Path) -> None:
    folder = byte_level(tmp_path / "folder", LLAMA)
    words = ("data.messages=messages", "task.name=language", "task.loss_on=assistant")
    _, batch = read(tmp_path, [{"messages": one} for one in chats()], folder, *words)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    for row, one in enumerate(chats()):
        expected = tokenizer.apply_chat_template(one, return_dict=True)["input_ids"]
        assert batch["tokens"][row][batch["tokens_mask"][row]].tolist() == expected
        found = tokenizer.decode(batch["tokens"][row][batch["answers"][row]])
        answers = [message["content"] for message in one if message["role"] == "assistant"]
        assert found == "".join(f" {text.strip()} <|endoftext|>" for text in answers)


@pytest.mark.parametrize("most", [None, 5, 30])
def test_texts_are_those_of_transformers(most: int | None, tmp_path: Path) -> None:
    """With special tokens, cut as truncation=True does; and of a language model, with an end."""
    cut = {} if most is None else {"truncation": True, "max_length": most}
    words = ["data.target=y", *([] if most is None else [f"data.context={most}"])]
    records = [{"text": text, "y": 1.5} for text in TEXTS]
    folder = word_pieces(tmp_path / "folder")
    source, batch = read(tmp_path, records, folder, *words)
    expected = transformers.AutoTokenizer.from_pretrained(folder)(
        TEXTS, padding=True, return_tensors="np", **cut
    )
    for name in ("input_ids", "attention_mask"):
        np.testing.assert_array_equal(batch[name], expected[name])
    assert source.fields["input_ids"].padding.value == 0
    folder = byte_level(tmp_path / "other", MARKED)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    texts = [text for text in TEXTS if text]
    words = [] if most is None else [f"data.context={most - 1}"]
    _, batch = read(tmp_path, [{"text": text} for text in texts], folder, *words)
    for row, text in enumerate(texts):
        ids = [*tokenizer(text)["input_ids"], tokenizer.eos_token_id][:most]
        assert batch["tokens"][row][batch["tokens_mask"][row]].tolist() == ids
