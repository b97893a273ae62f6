"""Several models of a custom loop, each with its optimizer, that step in turn: GANs, actor and
critic, student and teacher."""

from hvdtrain.core.extras import Extra

EXTRA = Extra(
    status="stable",
    says="Trains several models in turn in a custom loop, such as a GAN.",
    implements={"ctx.prepare(name=)": "hvdtrain.extras.in_turn.by_framework"},
)
