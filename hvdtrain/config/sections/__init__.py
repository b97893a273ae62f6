"""The keys that a user can set, in one module per section, with type, default, bounds, and the
description that `--help` and editors show. section.py defines a section."""
