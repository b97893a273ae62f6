"""Files of data sets: downloaded, staged on a node's disk, locked, and written whole or not at
all."""
