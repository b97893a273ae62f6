"""`hvdtrain schema`: prints the JSON Schema of configuration files."""

from __future__ import annotations

import json
from collections.abc import Sequence

from hvdtrain.config.json_schema import json_schema
from hvdtrain.errors import DONE, UserError

USAGE = """\
hvdtrain schema > schema.json
  prints the JSON Schema of configuration files; an editor completes and checks a file with the first line
  # yaml-language-server: $schema=schema.json"""


def schema(arguments: Sequence[str]) -> int:
    """Prints the schema; the exit code. Raises UserError where it is given an argument."""
    if {"-h", "--help"} & set(arguments):
        print(USAGE)
        return DONE
    if arguments:
        raise UserError(f"schema takes no arguments: {' '.join(arguments)}", "command line", "hvdtrain schema > schema.json")
    print(json.dumps(json_schema(), indent=1))
    return DONE
