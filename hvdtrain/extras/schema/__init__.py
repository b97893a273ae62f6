"""The command schema: the JSON Schema of configuration files."""
