"""Tensor parallelism: layers that are cut over the ranks of a group (Shoeybi et al. 2019,
arXiv:1909.08053, section 3)."""
