"""DiLoCo: local steps whose mean difference is a step of an outer optimizer."""
