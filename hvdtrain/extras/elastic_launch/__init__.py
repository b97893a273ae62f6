"""hvdtrain launch --elastic: a supervisor that starts a job again, on the hosts that are there."""
