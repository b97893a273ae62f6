"""What the features of a job cannot go with, a file for a section of keys: data that commands,
tests and docs/combinations.md read."""
