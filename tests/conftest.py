"""Fixtures for tests of several folders."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def jax_compilation_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """JAX compiles a program once in this process, not once for each learner: 0.3 s instead of 4 s for all programs of an MLP.

    Not in processes that tests start: ranks that write one entry at the same time could read half of it.
    """
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    settings = {
        "jax_compilation_cache_dir": str(tmp_path_factory.mktemp("jax-compilation-cache")),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()  # JAX looks at the settings once
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
