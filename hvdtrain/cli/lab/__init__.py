"""hvdtrain lab: the experiments of the course, and notebooks of their pages."""
