"""The configuration: the schema, its reader, its errors and help, and the plugins that values
name."""
