"""Read the study that a folder or a record describes."""

from pathlib import Path

from residua.errors import InputError, require, shown
from residua.lab.study.definition import Study, read_study
from residua.records import jsonlines
from residua.records.folder import read_object
from residua.records.jobs import Record


def read_folder(out: Path) -> Study:
    """The study that a folder holds. Raises InputError where it holds none."""
    if not (out / "study.json").is_file():
        raise InputError(
            f"{out} must be the folder of a study, found no study.json; residua study run FILE --out DIR makes one"
        )
    return read_study(read_object(out / "study.json"), str(out / "study.json"))


def read_runs(path: Path, data: str | None) -> list[Record]:
    """The records of a study's runs. Raises InputError for one on data of another fingerprint."""
    rows = jsonlines.read(path)
    for row in rows:
        fingerprint = row.get("facts", {}).get("data", {}).get("fingerprint", data)
        name = f"{path}: the run {shown(row['key'])}"
        require(data is None or fingerprint == data, name, f"of the data {data}", fingerprint)
    return rows
