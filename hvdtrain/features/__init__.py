"""What a job's features cannot go with, each in a file of its own: data that commands, tests and docs/combinations.md read."""
