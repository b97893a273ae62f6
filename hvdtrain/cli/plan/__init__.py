"""`plan`: what a configuration would do on several numbers of ranks; trains nothing."""
