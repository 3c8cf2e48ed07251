"""What everything long shares."""
