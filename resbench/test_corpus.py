"""The text of the records: does today's code make their tokens, to the last bit?

It needs data/resbench, which README.md says how to make. Its tokens give the documents back.
"""

import json
from pathlib import Path

import numpy as np
import pytest

from residua.lab.data import PreparedData, prepare

HERE = Path(__file__).parent
DATA = HERE.parent / "data" / "resbench"
TOGETHER = 500
"""Documents to decode at once."""


@pytest.fixture(scope="module")
def data():
    if not (DATA / "index.json").is_file():
        pytest.skip("no data/resbench, which takes ten minutes to make: resbench/corpus.py")
    return PreparedData.open(DATA)


def recorded():
    """The data of all records of the main study."""
    lines = (HERE / "records" / "main" / "records.jsonl").read_text(encoding="utf-8").splitlines()
    facts = [json.loads(line)["facts"]["data"] for line in lines]
    return {(each["fingerprint"], each["tokenizer_fingerprint"], each["sha256"]) for each in facts}


def test_the_tokens_in_the_folder_are_those_of_the_records(data):
    assert recorded() == {tuple(data.facts[name] for name in ("fingerprint", "tokenizer_fingerprint", "sha256"))}


@pytest.mark.nightly
@pytest.mark.timeout(7200)  # 200 MB of text, also on a busy machine
def test_the_command_reproduces_these_tokens(data, tmp_path):
    tokenizer = data.tokenizer().backend_tokenizer
    with (tmp_path / "resbench.jsonl").open("w", encoding="utf-8", newline="\n") as file:
        for split in (data.validation, data.train):  # once a document is held out, none waits: their order stays
            ids = split.window(0, len(split))
            documents = np.split(ids, np.flatnonzero(ids == data.eos_token_id)[:-1] + 1)
            for start in range(0, len(documents), TOGETHER):
                part = [document[:-1].tolist() for document in documents[start : start + TOGETHER]]
                for text in tokenizer.decode_batch(part, skip_special_tokens=False):
                    file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
    again = prepare(
        tmp_path / "resbench.jsonl", tmp_path / "data", vocab_size=2048, validation_fraction=0.001, progress=False
    )
    assert (again.fingerprint, again.facts["split"]) == (data.fingerprint, "documents")
