"""What crosses processes: the Communicator protocol, one file for each engine, and where this process stands among the ranks."""
