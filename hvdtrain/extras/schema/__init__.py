"""The command schema: the JSON Schema of configuration files."""

from hvdtrain.core.extras import Command, Extra

EXTRA = Extra(
    status="stable",
    says="Prints the JSON Schema of configuration files, for editors.",
    commands={
        "schema": Command(
            "hvdtrain.extras.schema.command",
            "hvdtrain schema > schema.json                            "
            "the JSON Schema of configuration files",
            line="a JSON Schema of configuration files, with which editors complete and check them",
        )
    },
)
