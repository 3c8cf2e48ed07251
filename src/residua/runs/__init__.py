"""What everything long shares: run folders, JSON lines, durable writing, progress, statistics, sweeps."""
