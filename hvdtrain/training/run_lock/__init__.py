"""One job at a time in a run folder: a lock file that works on any file system and across hosts. lock.py takes it."""
