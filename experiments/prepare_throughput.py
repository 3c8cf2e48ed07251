"""Measure how fast `residua prepare` turns text into tokens, and that its memory does not grow with the text.

The text is the embedded corpus, shuffled by sentences into documents of about 4 kB. Every fiftieth word is scrambled,
so that the tokenizer keeps meeting new words; it is a BPE of the corpus itself. Each row of the record is one run of
the command on parquet files made here. It has the tokens per second of wall time and of core time, and the peak memory.
A quarter of the text should need as much memory as all of it. Older rows are of processes, `workers` of them beside the
main one.

    python experiments/prepare_throughput.py [--bytes 1100000000] [--record experiments/prepare.jsonl]
"""

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from residua.lab.data import open_corpus, train_bpe
from residua.lab.data.tokenizer import save_tokenizer
from residua.lab.records.provenance import circumstances

DOCUMENT = 4_000
FILES = 8
VOCABULARY = 50_257
SCRAMBLED = 50
"""One word in this many is scrambled."""


def write_corpus(folder: Path, size: int, texts: list[str], seed: int = 0) -> int:
    """Write parquet files with about `size` bytes of text. Returns the bytes written."""
    draw = random.Random(seed)
    sentences = [s for text in texts for s in re.split(r"(?<=[.:])\s+", text) if 20 < len(s) < 2000]
    average = sum(map(len, sentences)) / len(sentences)
    folder.mkdir()
    written = 0
    for number in range(FILES):
        with pq.ParquetWriter(folder / f"{number:03d}.parquet", pa.schema({"text": pa.string()})) as writer:
            while written < size * (number + 1) / FILES:
                documents = []
                for _ in range(1000):
                    words = " ".join(draw.choices(sentences, k=int(DOCUMENT / average))).split(" ")
                    for place in draw.choices(range(len(words)), k=len(words) // SCRAMBLED):
                        words[place] = "".join(draw.sample(words[place], len(words[place])))
                    documents.append(" ".join(words))
                written += sum(len(document.encode()) for document in documents)
                writer.write_table(pa.table({"text": documents}))
    return written


def resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


def measure(source: Path, tokenizer: Path, out: Path) -> dict:
    """Run the command once and watch it from outside."""
    command = [
        *(sys.executable, "-m", "residua", "prepare", "--source", source, "--tokenizer", tokenizer, "--out", out),
        "--json",
    ]
    before, begun = os.times(), time.perf_counter()
    peak = 0
    with open(out.with_suffix(".json"), "wb") as answer:
        process = subprocess.Popen(command, stdout=answer)
        while process.poll() is None:
            peak = max(peak, resident(process.pid))
            time.sleep(0.2)
    if process.returncode:
        raise SystemExit(f"the command ended with status {process.returncode}")
    seconds, after = time.perf_counter() - begun, os.times()
    cores = after.children_user - before.children_user + after.children_system - before.children_system
    facts = json.loads(out.with_suffix(".json").read_text())
    return {
        "bytes": facts["bytes"],
        "tokens": facts["tokens"],
        "seconds": round(seconds, 1),
        "core_seconds": round(cores, 1),
        "tokens_per_second": round(facts["tokens"] / seconds),
        "tokens_per_core_second": round(facts["tokens"] / cores),
        "megabytes_per_core_second": round(facts["bytes"] / cores / 1e6, 2),
        "peak_memory_main": peak,
        "vocab_size": facts["vocab_size"],
        "fingerprint": facts["fingerprint"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path, default=Path(__file__).with_name("prepare.jsonl"))
    parser.add_argument("--bytes", type=int, default=1_100_000_000, help="size of the larger of the two corpora")
    args = parser.parse_args()
    texts = [document.text for document in open_corpus("stdlib")]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        save_tokenizer(train_bpe(texts, VOCABULARY), folder / "tokenizer")
        parts = {"quarter": args.bytes // 4, "whole": args.bytes}
        for part, size in parts.items():
            write_corpus(folder / part, size, texts)
        for part in parts:
            facts = circumstances(torch.device("cpu"))
            row = measure(folder / part, folder / "tokenizer", folder / f"{part}-tokens")
            row = {"text": part, **row, "load_after": os.getloadavg()[0], "facts": facts}
            with args.record.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            print(json.dumps({key: value for key, value in row.items() if key != "facts"}), flush=True)


if __name__ == "__main__":
    main()
