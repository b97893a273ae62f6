"""hvdtrain compare: what differs between two runs, and from which step on."""
