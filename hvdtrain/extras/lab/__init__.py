"""hvdtrain lab: the experiments of the course in labs/."""
