"""The parts of benchmarks/gpu.py: what each runs, and the rows that it writes."""
