"""plan --faults: the share of time that moves a job, whatever is done where a rank is lost."""
