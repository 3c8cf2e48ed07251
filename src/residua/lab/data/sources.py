"""Open a corpus by the name of its source."""

import os
from pathlib import Path

from residua.errors import require
from residua.lab.data.corpus import Corpus
from residua.lab.data.files import open_files
from residua.lab.data.hub import FINEWEB_EDU, SAMPLES, open_hub
from residua.lab.data.stdlib import open_stdlib


def open_corpus(source: str | os.PathLike[str], *, text_column: str = "text", sample: str | None = None) -> Corpus:
    """Open the corpus named by `source`.

    - "stdlib": the documentation inside this Python;
    - a file, or a folder of .txt, .md, .jsonl and .parquet files: see `open_files`;
    - "fineweb-edu" (`sample` picks a part), or "hf:OWNER/NAME[@REVISION][/CONFIG][:SPLIT]": see `open_hub`.

    Raises InputError if there is nothing to read. Reading raises it for text that cannot be used, with file and line.
    """
    samples = SAMPLES if source == FINEWEB_EDU else {}
    expected = f"one of {', '.join(samples)}" if samples else f"left out with {source}"
    require(sample is None or sample in samples, "sample", expected, sample)
    if isinstance(source, str) and (source == FINEWEB_EDU or source.startswith("hf:")):
        return open_hub(source, text_column=text_column, sample=sample)
    return open_stdlib() if source == "stdlib" else open_files(Path(source), text_column)
