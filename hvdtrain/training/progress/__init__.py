"""How far a job is, and when it synchronizes, evaluates and ends."""
