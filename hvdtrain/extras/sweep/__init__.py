"""hvdtrain sweep: runs many jobs that differ in some keys, several at a time, and shows which is
best."""
