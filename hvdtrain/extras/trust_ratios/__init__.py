"""Trust ratios of layers over time, as LARS, LARC and LAMB compute them."""
