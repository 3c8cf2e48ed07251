"""The commands of `residua`, one file for each."""
