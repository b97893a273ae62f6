"""PowerSGD: gradients are reduced as products of two thin matrices."""
