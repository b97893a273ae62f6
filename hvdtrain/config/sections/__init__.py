"""The keys that a user can set, a module for each section: type, default, bounds, and the
description that `--help` and editors show. What a section is: section.py."""
