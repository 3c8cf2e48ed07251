"""Read the study that a folder or a record describes."""

from pathlib import Path

from residua.errors import InputError, require, shown
from residua.lab.study.definition import Study, read_study
from residua.records import jsonlines
from residua.records.folder import read_object
from residua.records.jobs import Record

AUDITS = "audits.jsonl"
KEYS_OF_A_RUN = ("key", "kind", "rung", "scheme", "connection", "point", "seed", "steps", "val_loss")


def read_folder(out: Path) -> Study:
    """The study that a folder holds. Raises InputError where it holds none."""
    if not (out / "study.json").is_file():
        raise InputError(
            f"{out} must be the folder of a study, found no study.json; residua study run FILE --out DIR makes one"
        )
    return read_study(read_object(out / "study.json"), str(out / "study.json"))


def read_runs(path: Path, data: str | None) -> list[Record]:
    """The records of a study's runs. Raises InputError for one that is not whole, or on data of another fingerprint."""
    rows = jsonlines.read(path)
    for row in rows:
        name = f"{path}: the run {shown(row.get('key'))}"
        missing = [key for key in KEYS_OF_A_RUN if key not in row]
        require(not missing, name, f"a record with {', '.join(KEYS_OF_A_RUN)}", sorted(row))
        fingerprint = ((row.get("facts") or {}).get("data") or {}).get("fingerprint", data)
        require(data is None or fingerprint == data, name, f"of the data {data}", fingerprint)
    return rows
