"""User data as a Source: arrays, tables, a file of arrays, or a torch Dataset that is read in this
process or in worker processes."""
