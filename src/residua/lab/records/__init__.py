"""The records of runs: folders, JSON lines, statistics, tables, figures, progress."""
