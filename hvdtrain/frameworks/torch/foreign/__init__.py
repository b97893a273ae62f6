"""Third-party model folders and code: limits on files, downloads and model sizes."""
