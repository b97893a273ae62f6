"""Columns of text, dates, booleans and missing cells: their kinds, what is learned from the
training rows, and their encoding as numbers."""
