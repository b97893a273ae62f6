"""The kinds of plugins that this extra has."""
