"""One job from its configuration to its last line; loop.py is the page to read first."""
