"""Communication between processes: the Communicator protocol, one file for each engine, and this
process's placement among the ranks."""
