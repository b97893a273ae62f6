"""`hvdtrain schema`: prints the JSON Schema of configuration files."""

from __future__ import annotations

import json
from collections.abc import Sequence

from hvdtrain.config.json_schema import json_schema
from hvdtrain.errors import DONE, UserError


def schema(arguments: Sequence[str]) -> int:
    """Prints the schema; the exit code. Raises UserError where it is given an argument."""
    if arguments:
        raise UserError(f"schema takes no arguments: {' '.join(arguments)}", "command line", "python -m hvdtrain schema > schema.json")
    print(json.dumps(json_schema(), indent=1))
    return DONE
