"""What is measured of a job: seconds of each phase of a step, memory, energy, the duration of the
start."""
