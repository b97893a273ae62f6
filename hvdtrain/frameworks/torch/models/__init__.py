"""The models that model.name knows with framework=torch: one file each."""
