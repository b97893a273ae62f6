"""Gossip: between two averages over all ranks, a rank averages its weights with one neighbour."""
