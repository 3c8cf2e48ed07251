"""A larger local corpus, without a download: the docstrings of the Python packages that are installed.

Only packages with a permissive licence are read, and nothing of the text is redistributed. One JSON line for each
module goes to the file, and a second file beside it says which packages, versions and licences they were.

    python experiments/docstring_corpus.py corpus.jsonl
    residua prepare --source corpus.jsonl --out data/docstrings
"""

import argparse
import ast
import hashlib
import json
import re
import warnings
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any

PERMISSIVE = re.compile(r"\b(MIT|BSD|Apache|PSF|Python Software Foundation|ISC|HPND)\b", re.IGNORECASE)
RESTRICTIVE = re.compile(r"GPL|proprietary|commercial", re.IGNORECASE)
GENERATED = {"plotly"}  # the same few sentences for each of ten thousand settings
SHORTEST = 200
"""Characters below which a docstring says little."""


def licence(package: Distribution) -> str | None:
    """What its metadata say, where that is permissive."""
    metadata: Any = package.metadata
    said = [metadata.get("License-Expression"), *(metadata.get_all("Classifier") or [])]
    said = [text for text in said if text and (text == said[0] or text.startswith("License ::"))]
    if not said and metadata.get("License"):
        said = [metadata["License"].splitlines()[0]]
    text = "; ".join(said)
    return text if PERMISSIVE.search(text) and not RESTRICTIVE.search(text) else None


def docstrings(source: bytes) -> list[str]:
    """Those of a module, its classes and functions, in their order."""
    kinds = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        try:
            tree = ast.parse(source)
        except (SyntaxError, ValueError):
            return []
    found = [ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds)]
    return [text for text in found if text and len(text) >= SHORTEST]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    digest, seen, packages, size = hashlib.sha256(), set(), {}, 0
    with arguments.out.open("w", encoding="utf-8") as out:
        for package in sorted(distributions(), key=lambda package: package.name.lower()):
            allowed = licence(package)
            if allowed is None or package.name in GENERATED:
                continue
            characters = 0
            for file in sorted(str(path) for path in package.files or [] if path.suffix == ".py"):
                path = Path(package.locate_file(file))
                if not path.is_file():
                    continue
                new = [text for text in docstrings(path.read_bytes()) if text not in seen]
                if not new:
                    continue
                seen.update(new)
                line = json.dumps({"text": "\n\n".join(new)}, ensure_ascii=False) + "\n"
                digest.update(line.encode("utf-8", "surrogatepass"))
                out.write(line)
                characters += sum(map(len, new))
            if characters:
                packages[package.name] = {"version": package.version, "licence": allowed, "characters": characters}
                size += characters
                print(f"{package.name} {package.version}: {characters:,} characters ({allowed})", flush=True)
    facts = {"characters": size, "sha256": digest.hexdigest(), "packages": packages}
    arguments.out.with_suffix(".facts.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    print(f"{arguments.out}: {size:,} characters of {len(packages)} packages")


if __name__ == "__main__":
    main()
