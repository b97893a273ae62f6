"""What a configuration that is not supported is refused with."""

from __future__ import annotations

import pytest

from hvdtrain.config.read import configure
from hvdtrain.errors import UserError
from hvdtrain.training.conflicts import refuse_conflicts


def refusal_of_job(words: str, engine: str, ranks: int) -> tuple[str, str, str]:
    """Returns the message, the place of the conflict (the key, its file and line), and the fix."""
    with pytest.raises(UserError) as caught:
        refuse_conflicts(configure(None, words.split()), engine, ranks)
    return caught.value.what, caught.value.where, caught.value.fix
