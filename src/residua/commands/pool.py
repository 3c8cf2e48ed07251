"""The options of commands that make many runs: how many at the same time, and where."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_type_hints

from residua.errors import Count, InputError, did_you_mean, extra, fits, require, shown, words

if TYPE_CHECKING:
    from residua.records.jobs import Executor

INTERNAL = {"return", "command", "folder", "map_count", "nodes", "ntasks_per_node", "num_gpus", "srun_args"}
"""Parameters of submitit that it fills in itself, and those that would make several processes of a run."""


@dataclass(frozen=True)
class Pool:
    """Where runs are made.

    Args:
        processes: runs at the same time, each with one thread (default: 1, or all with slurm)
        executor: processes of this machine, or jobs of a cluster
        slurm (NAME=VALUE): options of sbatch: time=720 (in minutes, needed) partition=gpu gres=gpu:1 mem=16G
    """

    processes: Count | None = None
    executor: Literal["local", "slurm"] = "local"
    slurm: tuple[str, ...] = ()

    def executor_of_jobs(self) -> "Executor | None":
        """Return what `run_jobs` takes as its executor.

        Raises:
            InputError: an option of sbatch is unknown or of another type, or this machine is not of a cluster.
            ModuleNotFoundError: submitit is not installed.
        """
        if self.executor == "local":
            require(not self.slurm, "--slurm", "given with --executor slurm", self.slurm)
            return None
        with extra("slurm"):
            import submitit
            from submitit.slurm.slurm import _make_sbatch_string
        from residua.records.reading import parse_yaml
        from residua.records.slurm import Slurm

        require(submitit.__version__.startswith("1.5."), "submitit", "1.5 (residua[slurm])", submitit.__version__)
        if submitit.SlurmExecutor.affinity() < 0:
            raise InputError("--executor slurm must run on a machine of the cluster, found no srun here")
        kinds = {name: kind for name, kind in get_type_hints(_make_sbatch_string).items() if name not in INTERNAL}
        options: dict[str, Any] = {}
        for name, _, text in (text.partition("=") for text in self.slurm):
            if name not in kinds:
                raise InputError(f"--slurm has no option {shown(name)}{did_you_mean(name, kinds)}")
            values = [value for value in (parse_yaml(text, "--slurm"), text) if fits(value, kinds[name])]
            require(bool(values), f"--slurm {name}", words(kinds[name]), text)
            options[name] = values[0]
        require("time" in options, "--slurm", "at least time=MINUTES, the limit of a job", self.slurm)
        return Slurm(options, self.processes)
