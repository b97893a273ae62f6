"""Processes that read samples for a rank: of a torch Dataset of the user's own, or images that have to be decoded."""
