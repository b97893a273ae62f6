"""Which cores a rank runs on (comm.bind): the host's topology, each rank's share of it, and the
binding of a rank's threads."""
