"""Images: found in archives, decoded, packed into array files, augmented."""
