"""hvdtrain sweep: many jobs that differ in some keys, side by side, and which of them is best."""
