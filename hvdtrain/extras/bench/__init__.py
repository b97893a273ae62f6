"""`bench`: measures the parts of a job on this machine; `lr-find`."""
