"""Texts of records, from JSON lines or columns of tables, as tokens: documents, classes, chats."""

from hvdtrain.core.extras import Extra

EXTRA = Extra(
    status="stable",
    says="Trains on documents, labelled texts and chats in JSON lines and columns of tables.",
    needs=("split_files", "tokenizer_folders"),
    document_files={".jsonl": "jsonl", ".ndjson": "jsonl"},
)
