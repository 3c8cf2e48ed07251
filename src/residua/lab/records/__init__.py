"""What a run leaves: folders, JSON lines, statistics, tables, figures, progress."""
