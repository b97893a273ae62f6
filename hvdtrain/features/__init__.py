"""What the features of a job exclude, one file for each section of keys. Commands, tests and
docs/combinations.md read this data."""
