"""`drill`: kills or pauses ranks of a running job of one's own, to see that it lives."""
