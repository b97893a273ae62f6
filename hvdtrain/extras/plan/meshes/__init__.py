"""plan --parallel: ways to divide ranks and model, and how long they take."""
