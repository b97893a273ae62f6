"""Models that other libraries know by names of their own: model.name=LIBRARY:NAME."""
