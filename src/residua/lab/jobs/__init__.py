"""The execution of runs: in worker processes, or on Slurm."""
