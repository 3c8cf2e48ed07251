"""Runs in worker processes, and on Slurm."""
