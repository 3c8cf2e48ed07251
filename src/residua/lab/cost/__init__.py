"""The cost of training: counted before a run (`estimate`), and measured (`steps`, `measured_memory`)."""
