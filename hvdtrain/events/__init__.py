"""The stream of events and its sinks: the terminal, events.jsonl, log files of ranks, trackers."""
