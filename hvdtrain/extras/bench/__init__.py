"""`bench`: how fast this machine does what a job consists of; `lr-find`."""
