"""What a report computes from runs: key figures, groups of seeds, comparisons and meshes."""
