"""Functions of a script as a task: a loss of its own, and metrics of its own for any task."""
