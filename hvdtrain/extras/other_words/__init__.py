"""Answers words of other tools with the key or value that they mean here."""

from hvdtrain.core.extras import Extra

EXTRA = Extra(
    status="stable",
    says="Answers keys and values of other tools, such as lr or mse, with those of hvdtrain.",
    words="hvdtrain.extras.other_words.answers",
)
