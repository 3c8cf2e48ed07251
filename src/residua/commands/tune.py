"""The command `residua study tune`."""

from pathlib import Path

from residua.commands.configuration import Configuration
from residua.commands.pool import PoolOptions
from residua.commands.signature import Output
from residua.errors import Count, InputError


def tune(
    *,
    out: str | None = None,
    over: tuple[str, ...] = (),
    seeds: Count = 1,
    neighbours: bool = False,
    finalists: Count | None = None,
    pool: PoolOptions,
    keep_runs: bool = False,
    configuration: Configuration,
) -> Output | None:
    """Tune keys of a configuration: train every point of a grid of values.

    Values that are not positive numbers, such as those of model.connection, form groups, which are tuned separately.
    So do the values of keys that determine how a loss is measured, such as train.sequence_length and the data keys.

    Examples:
        residua study tune --config tiny --over train.lr=1e-3,2e-3 --out sweeps/lr
        residua study tune --config tiny --out sweeps/two --seeds 3 --processes 2 \\
            --over model.connection=residual,ddl train.lr=2e-3,4e-3
        residua study tune --config tiny-ddl --over train.lr=2e-3 --neighbours --out s

    Args:
        out (DIR): a new folder, or the folder of a sweep to continue
        over (KEY=VALUE,...): keys and the values to try
        seeds: seeds for each point
        neighbours: continue from the best point of the grid: train its neighbours, each number halved and doubled,
            until none is better
        finalists: best points of each group that get more than one seed (default: all, or 3 with --neighbours)
        keep_runs: keep the run folders and their last checkpoints
    """
    if configuration.print_config:
        configuration.load(needed="")
        return None
    if out is None:
        raise InputError("give --out DIR, the folder of the sweep")
    from residua.lab.records.folder import read_object
    from residua.lab.study.sweep import Sweep, parse_over, train_sweep

    sweep = Sweep(
        configuration.config,
        configuration.overrides,
        parse_over(over),
        seeds=seeds,
        neighbours=neighbours,
        finalists=3 if neighbours and finalists is None else finalists,
        begun=read_object(settings) if (settings := Path(out) / "settings.json").is_file() else {},
    )
    outcome = train_sweep(sweep, out, processes=pool.processes or 1, executor=pool.executor_of_jobs(), keep=keep_runs)
    parts = [outcome.table(), *(f"note: {note}" for note in outcome.notes), f"written: {Path(out) / 'records.jsonl'}"]
    if outcome.finite:
        parts.append(f"written: {Path(out) / 'sweep.png'}")
    for group, command in outcome.commands.items():
        parts.append(f"train the best{'' if outcome.unit else f' of {group}'} with: {command}")
    return Output(outcome.to_json(), parts)
