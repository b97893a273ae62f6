"""One job from its configuration to its last line. Read loop.py first; job.py has its parts,
train_job.py its order."""
