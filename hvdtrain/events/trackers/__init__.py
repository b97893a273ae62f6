"""The trackers that log.trackers knows: one file each."""
