"""How the gradients of the ranks become one: a strategy in each file, and select_strategy() that picks the one of a job."""
