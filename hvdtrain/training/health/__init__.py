"""What ends a job before its time: signals, time limits, stalls, numbers that are not finite,
replicas that differ."""
