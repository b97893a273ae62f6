"""The user's own data as a Source: arrays, tables, a file of arrays, a torch Dataset read in this
process or in worker processes."""
