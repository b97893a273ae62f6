"""bench scaling: real jobs on more and more ranks, and a prediction for many."""
