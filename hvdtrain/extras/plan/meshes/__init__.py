"""plan --parallel, plan --pipeline: ways to divide ranks and model, and how long they take."""
