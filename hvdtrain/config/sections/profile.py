"""The section profile: traces of single steps."""

from __future__ import annotations

from pydantic import Field

from hvdtrain.config.sections.extra_keys import with_keys_of_extras
from hvdtrain.config.sections.section import Section


@with_keys_of_extras
class ProfileConfig(Section):
    """Traces of single steps; HOROVOD_TIMELINE=FILE in the environment makes Horovod write its own
    timeline as well."""

    section = "profile"
    steps: str | None = Field(
        default=None,
        description="A:B traces the steps after step A up to step B on every rank into "
        "RUN/profile/rank-00000/, to open at https://ui.perfetto.dev; slows these "
        "steps",
    )
