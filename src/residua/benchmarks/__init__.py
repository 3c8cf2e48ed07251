"""Measuring speed fairly: candidates take turns in one process, and every number is a ratio within one round."""
