"""One stream of events, and where it goes: terminal, events.jsonl, log files of ranks, trackers."""
