"""How the gradients of the ranks become one: a strategy in each file."""
