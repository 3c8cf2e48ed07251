"""What training costs: counted before a run (`estimate`), and measured (`steps`, `measured_memory`)."""
