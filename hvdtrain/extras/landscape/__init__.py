"""The loss around trained weights, and between two runs; how sharp its minima are."""
