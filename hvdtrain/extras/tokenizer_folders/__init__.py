"""Tokenizers and chat templates in the folders that transformers writes."""

from hvdtrain.core.extras import Extra

EXTRA = Extra(
    status="stable",
    says="Encodes texts and chats by a folder of transformers, with the answers of chats.",
)
