"""A GPU simulated on a CPU build of torch: `load.py` starts it, before torch is imported."""
