"""The data of a configuration: opened, split, padded, weighted, with names of classes."""
