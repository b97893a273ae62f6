"""Model folders and code from others: limits on their files, downloads and model sizes."""
