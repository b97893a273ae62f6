"""The registration of words of other tools as an extra."""

from hvdtrain.core.extras import Extra

EXTRA = Extra(
    status="stable",
    says="Answers keys and values of other tools, such as lr or mse, with those of hvdtrain.",
    words="hvdtrain.extras.other_words.tables",
)
