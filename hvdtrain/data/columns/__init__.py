"""Columns of text, dates, truth values and missing cells: their kinds, what is learned of the
training rows, and the numbers that they become."""
