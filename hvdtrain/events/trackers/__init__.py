"""Trackers: sinks that send events to other products, one file each; log.trackers names them."""
