"""Where horovod.common has the names that scripts import from it: exceptions, process_sets, util,
elastic."""
