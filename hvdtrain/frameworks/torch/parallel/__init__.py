"""How the gradients of the ranks are reduced: one file for each strategy, and which one a job takes."""
