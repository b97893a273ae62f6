"""Images, each of one of several classes."""
