"""hvdtrain report: one run, or several side by side, as an HTML page and pictures."""
