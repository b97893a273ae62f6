"""hvdtrain drill: kills or pauses ranks of a running job, and measures how it recovers."""
