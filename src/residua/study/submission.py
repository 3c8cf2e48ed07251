"""Submit a scheme to a study: its records in one file, which a report takes if they are valid.

The first line says what study it is; then one line for every run, of the baselines too, and for every cost.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from residua.connections import describe, resolve
from residua.errors import InputError
from residua.runs import jsonlines
from residua.runs.folder import read_object, writable
from residua.study.folder import AUDITS, SHARED, plain, read_folder, restore
from residua.study.plan import Study, untried
from residua.study.records import checked_audits, checked_costs, checked_runs, source
from residua.study.results import Results, Row, merged, results


def submit(folder: str | Path, scheme: str, *, out: str | Path | None = None) -> Path:
    """Write the records of one scheme of a study's folder, and its baselines', to one file; return its path.

    out: the file; None for SCHEME.jsonl in the working directory. Raises InputError for what makes no valid row.
    """
    folder = Path(folder)
    whole = read_folder(folder)
    if scheme not in whole.schemes:
        raise InputError(f"--scheme: expected a scheme of {folder} ({', '.join(whole.schemes)}), got {scheme!r}")
    study = whole.only([scheme])
    paths = folder / "records.jsonl", folder / "costs.jsonl"
    records = [row for row in checked_runs(jsonlines.read(paths[0]), str(paths[0])) if row["scheme"] in study.schemes]
    costs = [row for row in checked_costs(jsonlines.read(paths[1]), str(paths[1])) if row["scheme"] in study.schemes]
    there = {row["rung"] for row in records if row["scheme"] == scheme and row["kind"] == "report"}
    study = study.only([scheme], [name for name in study.rungs if name in there] or None)
    found = results(study, records, costs)
    expect_valid(found, scheme, str(folder))
    connection = resolve(study.schemes[scheme].connection)
    now = source(connection)
    if now is None:
        raise InputError(f"--scheme: expected a scheme that a file holds, got {scheme!r}; put it in a package")
    for row in records:
        if row["scheme"] == scheme and row.get("source", now) != now:
            raise InputError(
                f"{folder}: {now['file']} has changed since {row['key']!r}; put it back, or train it again"
            )
    header = {
        "submission": scheme,
        "data": read_object(folder / "settings.json").get("data"),
        "study": asdict(study),
        "options": describe(connection),
        "source": now,
    }
    lines = [header, *({"run": row} for row in records), *({"cost": row} for row in costs)]
    path = Path(out or f"{scheme}.jsonl".replace("/", "_").replace(":", "_"))
    with writable(path, "a file to write"):
        path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def read_results(folder: str | Path, also: Sequence[str | Path] = ()) -> Results:
    """The results in a study's folder, with those that were submitted. Needs neither the data nor the folder's lock.

    Raises:
        InputError: the folder holds no study, or a submission is not valid for it.
    """
    folder = Path(folder)
    study = read_folder(folder)
    fingerprint = read_object(folder / "settings.json").get("data")
    runs, costs, audits = (
        check(jsonlines.read(folder / name), str(folder / name))
        for name, check in (
            ("records.jsonl", partial(checked_runs, data=fingerprint)),
            ("costs.jsonl", checked_costs),
            (AUDITS, checked_audits),
        )
    )
    found = merged(results(study, runs, costs), [read_submission(path, study, fingerprint) for path in also])
    return found.with_audits(audits)


def read_submission(path: str | Path, study: Study, fingerprint: str | None) -> Results:
    """The results in a submitted file, its differences to the baselines that came with it.

    Raises:
        InputError: it is no submission, of another study or other data, or its row is not valid.
    """
    rows = jsonlines.read(path)
    header = rows[0] if rows else {}
    if not isinstance(header.get("submission"), str) or not isinstance(header.get("study"), dict):
        raise InputError(f"{path}: expected the file that residua study submit writes")
    if header.get("data") != fingerprint:
        raise InputError(
            f"{path}: expected runs on the data {fingerprint}, got {header.get('data')}; its losses cannot be compared"
        )
    theirs = restore(header["study"], str(path))
    for name in (*SHARED, "title", "seeds", "tuning", "baselines", "longer"):
        if plain(getattr(theirs, name)) != plain(getattr(study, name)):
            raise InputError(f"{path}: expected the study's own {name}, got {getattr(theirs, name)}")
    for name, rung in theirs.rungs.items():
        if plain(study.rungs.get(name)) != plain(rung):
            raise InputError(f"{path}: expected the study's own rungs, got {name} {dict(rung.keys)}")
    for name in theirs.schemes.keys() & study.schemes.keys():
        if plain(theirs.schemes[name]) != plain(study.schemes[name]):
            raise InputError(f"{path}: expected the study's own scheme {name}, got {theirs.schemes[name].connection}")
    runs, costs = ([row[name] for row in rows if isinstance(row.get(name), dict)] for name in ("run", "cost"))
    found = results(theirs, checked_runs(runs, str(path), fingerprint), checked_costs(costs, str(path)))
    expect_valid(found, header["submission"], str(path))
    name, told = header["submission"], header.get("source")
    own_package = "package" in (header.get("options") or {})
    for run in runs:
        if run["scheme"] == name and run.get("source", None if own_package else told) != told:
            raise InputError(f"{path}: expected runs of one file, {told}, got {run.get('source')} in {run['key']!r}")
    own = [row for row in found.rows if row.scheme in (name, *theirs.baselines)]  # others were not checked
    return replace(found, rows=own, unfinished=())


def expect_valid(found: Results, scheme: str, where: str) -> None:
    """Check that a scheme's rows are ones that others can believe.

    Raises:
        InputError: the scheme is a baseline; seeds, baselines, costs or tuning runs are missing, there are more than
            the budget or fewer than the search takes, a reported run diverged or lacks its facts, or runs were made
            with changed code or on several machines.
    """
    if scheme in found.study.baselines:
        raise InputError(f"{where}: expected a scheme beside the baselines, got {scheme}, which is one of them")
    own = [row for row in found.rows if row.scheme == scheme]
    if not own:
        raise InputError(f"{where}: expected finished runs of {scheme}, found none")
    for row in own:
        beside = [found.row(row.rung, name) for name in found.study.baselines]
        if missing := [name for name, one in zip(found.study.baselines, beside) if one is None]:
            raise InputError(f"{where}: expected the baseline {missing[0]} at {row.rung} beside {scheme}, found none")
        for one in (row, *beside):
            _expect_valid_row(found.study, one, f"{where}: {one.scheme} at {one.rung}")
        for name in ("device", "torch"):
            facts = [run["facts"] for one in (row, *beside) for run in one.runs if run.get("facts")]
            seen = sorted({str(one.get(name)) for one in (*facts, *(one.cost for one in (row, *beside)))})
            if len(seen) > 1:
                raise InputError(f"{where}: expected one {name} for all runs at {row.rung}, found {', '.join(seen)}")


def _expect_valid_row(study: Study, row: Row, where: str) -> None:
    if not row.whole:
        raise InputError(f"{where}: expected the seeds {list(study.seeds_at(row.rung))}, found {list(row.losses)}")
    if row.loss is None:
        raise InputError(f"{where}: expected a loss of every seed, found a run that diverged")
    budget = study.tuning.baseline_runs if row.scheme in study.baselines else study.tuning.runs
    for rung in study.searches(row.rung):
        searched = [run for run in row.runs if run["kind"] == "tune" and run["rung"] == rung]
        if not 1 <= len(searched) <= budget:
            raise InputError(f"{where}: expected 1 to {budget} tuning runs at {rung}, found {len(searched)}")
        if missing := untried(study, rung, row.scheme, searched):
            raise InputError(
                f"{where}: expected a finished search at {rung}, found {len(searched)} tuning runs, without the point "
                f"{missing[0]}"
            )
    if row.cost is None:
        raise InputError(f"{where}: expected its time and memory, found none; run the study without --no-costs")
    for run in row.runs:
        facts = run.get("facts") or {}
        known = {name: facts.get(name) for name in ("commit", "device", "torch", "parameters")}
        known |= {"data": (facts.get("data") or {}).get("fingerprint"), "curve": run.get("curve")}
        if run["val_loss"] is not None and (missing := [name for name, value in known.items() if not value]):
            raise InputError(f"{where}: expected runs with their {', '.join(known)}, found one without {missing[0]}")
        own = {"tune": (study.tuning.seed,), "final": study.tuning.judges}.get(run["kind"])
        if own and run["seed"] not in own:
            raise InputError(f"{where}: expected tuning with the seeds {list(own)}, found {run['seed']}")
        if run["val_loss"] is not None and str(facts.get("commit")).endswith("-dirty"):
            raise InputError(
                f"{where}: expected runs of committed code, found {facts['commit']}; commit, and run them again"
            )
