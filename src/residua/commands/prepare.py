"""The command `residua prepare`."""

import shlex
from pathlib import Path
from typing import Annotated, Literal

from residua.commands.signature import Output
from residua.errors import at_most
from residua.lab.records.folder import new_folder
from residua.lab.records.table import cell

DIGESTS = ("sha256", "fingerprint", "tokenizer_fingerprint")


def prepare(
    *,
    source: str,
    out: str,
    tokenizer: str = "bpe",
    vocab_size: Annotated[int, at_most(2**24)] | None = None,
    sample: str | None = None,
    text_column: str = "text",
    validation_fraction: float | None = None,
    split: Literal["documents", "share"] | None = None,
    longest_document: int | None = None,
    shard_tokens: int = 100_000_000,
) -> Output:
    """Turn text into tokens on disk.

    Examples:
        residua prepare --source stdlib --out data/stdlib
        residua prepare --source my-texts/ --out data/mine --vocab-size 8192
        residua prepare --source fineweb-edu --tokenizer gpt2 --out data/fineweb-edu
        residua prepare --source hf:OWNER/NAME:train --out data/theirs

    Args:
        source (TEXT): stdlib (the documentation inside this Python), a file or folder of .txt, .md, .jsonl, .json,
            .csv, .tsv, .parquet or .arrow (texts also in .gz or .zst), fineweb-edu, or
            hf:OWNER/NAME[@REVISION][/CONFIG][:SPLIT], a data set of the hub
        out (DIR): a new folder
        tokenizer (bpe|byte|gpt2|DIR): trained here, bytes, GPT-2's, a saved one, or hf:OWNER/NAME from the hub
        vocab_size: entries of a trained tokenizer (default: 2048)
        sample (10BT|100BT|350BT): the part of fineweb-edu, in billions of tokens (default: 10BT)
        text_column: the key of the text in rows and data sets; meta.text is the text inside meta
        validation_fraction: share of the text held out (default: 0.05; of fineweb-edu about 100 million tokens)

    Rarely:
        split: documents: hold out each document by its own hash; share: hold out the share to within 5 %, if need be by
            cutting a document (default: documents, if it comes close)
        longest_document: the longest document in characters; longer ones are cut, 0 cuts none (default: 8192 in text
            files, elsewhere 0)
        shard_tokens: tokens in a file
    """
    new_folder(out, "--out")  # raises before torch is imported
    from residua.lab.data import prepare

    data = prepare(
        source,
        out,
        vocab_size=vocab_size,
        tokenizer=tokenizer,
        validation_fraction=validation_fraction,
        shard_tokens=shard_tokens,
        text_column=text_column,
        sample=sample,
        split=split,
        longest_document=longest_document,
    )
    facts = {"folder": str(data.folder), **data.facts}
    shown = {**facts, "folder": out}.items()
    rows = [[name, cell(value)[: 12 if name in DIGESTS else None]] for name, value in shown]
    base = list(Path(tokenizer).glob("*.safetensors"))  # a folder with weights is a model that can be trained on
    recipe = f"retrofit --model.base {shlex.quote(tokenizer)}" if base else "tiny"
    advice = f"train on it with: residua train --config {recipe} --data.path {shlex.quote(out)} --run DIR"
    return Output(facts, [(["what", "value"], rows), advice])
