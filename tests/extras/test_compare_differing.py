"""The keys whose values differ between runs."""

from __future__ import annotations

import pytest
from run_events import record_of, start

from hvdtrain.config.sections.extra_keys import defaults, key_classes
from hvdtrain.config.sections.section import Section
from hvdtrain.extras.compare.differing import differing_keys


def test_differing_keys() -> None:
    first = record_of([start()], run="a", seed=1)
    second = record_of([start()], run="b", seed=2)
    del second.config["comm.compression"]
    assert differing_keys([first, second]) == [
        ("seed", [1, 2]),
        ("comm.compression", ["same", None]),
    ]


@pytest.mark.parametrize("kind", key_classes(), ids=lambda kind: kind.section)
def test_a_run_has_the_defaults_of_keys_of_extras(kind: type[Section]) -> None:
    """It records the keys of an extra that it uses."""
    plain = record_of([start()])
    recorded = record_of([start()])
    key, *others = (kind.full_key(name) for name in kind.model_fields)
    recorded.config.update({each: defaults()[each] for each in (key, *others)})
    assert differing_keys([plain, recorded]) == []
    recorded.config[key] = 2
    assert differing_keys([plain, recorded]) == [(key, [defaults()[key], 2])]
