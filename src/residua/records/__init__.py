"""What a run leaves, and how it is written: folders, durable files, JSON lines, jobs, statistics and tables."""
