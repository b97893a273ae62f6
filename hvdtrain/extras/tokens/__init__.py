"""Files of token ids: data.name=tokens trains on them, and `hvdtrain tokenize` writes them."""

from hvdtrain.core.extras import Command, Extra

EXTRA = Extra(
    status="stable",
    says="Trains on files of token ids, mixes several sets, and creates them from texts.",
    needs=("split_files",),
    commands={
        "tokenize": Command(
            "hvdtrain.extras.tokens.command",
            "hvdtrain tokenize --to DIR FILES                         "
            "texts, JSON lines and Parquet files as files of tokens",
            listed_at=420,
            on_ranks=True,
        ),
    },
)
