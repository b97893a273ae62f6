"""Tensor parallelism: layers of which each rank of a group has a part (Shoeybi et al. 2019,
arXiv:1909.08053, section 3)."""
