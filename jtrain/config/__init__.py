"""Run configs: the `Run` dataclass, loading by name, flat paths, and the rules for resuming."""
