"""Images: decoded, packed, resized, augmented."""
