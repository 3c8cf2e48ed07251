"""The options of commands with many runs: how many at a time, and where."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from residua.errors import Count, require

if TYPE_CHECKING:
    from residua.lab.jobs.pool import Executor


@dataclass(frozen=True)
class PoolOptions:
    """The processes or jobs that carry out the runs.

    Args:
        processes: runs at the same time, each with one thread (default: 1, or all with slurm)
        executor: processes of this machine, or jobs of a cluster
        slurm (NAME=VALUE): options of sbatch: time=720 (in minutes, needed) partition=gpu gres=gpu:1 mem=16G
    """

    processes: Count | None = None
    executor: Literal["local", "slurm"] = "local"
    slurm: tuple[str, ...] = ()

    def executor_of_jobs(self) -> "Executor | None":
        """Return the executor for `run_jobs`; None for processes of this machine. Raises the errors of `Slurm.of`."""
        if self.executor == "local":
            require(not self.slurm, "--slurm", "given with --executor slurm", self.slurm)
            return None
        from residua.lab.jobs.slurm import Slurm

        return Slurm.of(self.slurm, self.processes)
