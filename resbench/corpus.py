"""Make the corpus of ResBench: English documentation out of Debian's packages, more than 200 MB of clean text.

Downloads the packages without installing them, takes the text out of their HTML, reStructuredText, Markdown, info and
plain files, drops what is no prose (tables, code lists, other languages) and every paragraph that was there before.
One JSON line for each file goes to OUT; OUT.facts.json beside it names packages, versions, licences and the hash.
The text itself is not redistributed.

    apt-get update
    python resbench/corpus.py resbench.jsonl
    residua prepare --source resbench.jsonl --out data/resbench --vocab-size 2048 --validation-fraction 0.001

With `--without resbench.jsonl` it makes a second held-out text: the beginnings of pages of other packages, at most
`MOST` of each so that no package weighs much, without the paragraphs of the first text.

    python resbench/corpus.py further.jsonl --without resbench.jsonl
    residua prepare --source further.jsonl --out data/further --validation-fraction 0.999 \\
        --tokenizer data/resbench/tokenizer
"""

import argparse
import gzip
import hashlib
import json
import multiprocessing
import re
import subprocess
import tempfile
import zlib
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import NamedTuple

# Documentation in main, which Debian's policy keeps to free licences; each package's own are in the facts.
PACKAGES = """
apache2-doc autoconf-doc axiom-doc bash-doc bind9-doc binutils-doc cinder-doc clang-16-doc cmake-doc cython-doc
debian-faq debian-handbook debian-policy debian-reference-en developers-reference dict-foldoc dict-gcide dict-jargon
dict-wn erlang-doc exim4-doc-html gap-doc ghc-doc gimp-help-en git-doc gnome-user-docs gnucash-docs gnuplot-doc
grass-doc groovy-doc keystone-doc kicad-doc-en libboost1.81-doc libcurl4-doc libeigen3-doc libglib2.0-doc libgtk-3-doc
libgtk-4-doc libhdf5-doc libreoffice-help-en-us libssl-doc libxml2-doc linux-doc-6.1 llvm-14-doc llvm-16-doc m4-doc
maint-guide maxima-doc mpich-doc netcdf-doc neutron-doc nodejs-doc nova-doc octave-doc opencv-doc openjdk-17-doc
openmpi-doc postfix-doc postgresql-doc-15 python-astropy-doc python-dask-doc python-django-doc python-pandas-doc
python-scipy-doc python-sklearn-doc python-sqlalchemy-doc python-statsmodels-doc python-sympy-doc python-xarray-doc
python3.11-doc qtbase5-doc-html r-doc-html r-doc-info
""".split()  # noqa: SIM905
FURTHER = """
aptitude-doc-en beets-doc borgbackup-doc brz-doc buildbot-doc cargo-doc ceilometer-doc clisp-doc courier-doc crystal-doc
csound-doc dbus-1-doc dblatex-doc docker-doc docutils-doc doxygen-doc dpdk-doc ecasound-doc fai-doc ffmpeg-doc flex-doc
fontforge-doc form-doc freetds-doc frr-doc ganeti-doc gettext-doc ghostscript-doc gnuradio-doc gnutls-doc gprolog-doc
gpsbabel-doc gretl-doc groonga-doc guile-3.0-doc h2o-doc haproxy-doc heat-doc lilypond-doc-html mailman3-doc ntpsec-doc
python-celery-doc python-flask-doc python-mpmath-doc python-tornado-doc python-werkzeug-doc rsyslog-doc scons-doc
shorewall-doc slurm-wlm-doc sphinx-doc sqlite3-doc swi-prolog-doc tcl8.6-doc tk8.6-doc twisted-doc vim-doc yade-doc
zsh-doc
""".split()  # noqa: SIM905
MOST, BEGINNING = 30, 1000
"""Of the second text: documents of a package, evenly spread over its pages, and characters of each."""
SHORTEST = 60
"""Characters below which a paragraph is a heading, a button or an entry of a list."""
SHORTEST_DOCUMENT = 200
RECORDS = ("corpus.json", "further.json")
COMMON = re.compile(
    r"\b(?:the|of|to|and|is|in|for|that|be|this|are|with|or|it|as|by|if|an|on|not|you|can|will)\b", re.I
)
OTHER = re.compile(r"[^\x09\x0a\x20-\x7e\u2010-\u2026\u00a0-\u00ff]")
MARKUP = re.compile(r"</?[a-zA-Z][^<>\n]{0,200}>|&[a-z]{2,8};|&#\d+;")
LICENCE_FIELD = re.compile(r"^License:[ \t]*(\S.*?)[ \t]*$", re.MULTILINE)
LICENCE_NAME = re.compile(
    r"GNU (?:\w+ )+License|\b(?:GPL|LGPL|GFDL|BSD|MIT|Apache|Artistic|CC-BY\S*|PSF|public domain)\b"
)
TAG = re.compile(r"</?[a-z]+[^>]*>")  # over lines too, which MARKUP does not see
BLOCKS = frozenset(
    {"p", "li", "dd", "dt", "h1", "h2", "h3", "h4", "h5", "h6", "td", "th", "pre", "blockquote", "div", "section",
     "article", "figcaption", "caption"}
)  # fmt: skip
SKIPPED = frozenset(
    {"script", "style", "head", "nav", "footer", "svg", "math", "button", "select", "template"}
)  # fmt: skip


class Text(HTMLParser):
    """The paragraphs of an HTML page."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.paragraphs: list[str] = []
        self._parts: list[str] = []
        self._skipped = self._pre = 0

    def updatepos(self, i: int, j: int) -> int:
        return j  # lines and columns, which nobody asks for, would take a sixth of the time

    def handle_starttag(self, tag: str, attributes: object) -> None:
        self._skipped += tag in SKIPPED
        self._pre += tag == "pre"
        if tag in BLOCKS:
            self.end()

    def handle_endtag(self, tag: str) -> None:
        self._skipped = max(0, self._skipped - (tag in SKIPPED))
        if tag in BLOCKS:
            self.end()
        self._pre = max(0, self._pre - (tag == "pre"))

    def handle_data(self, data: str) -> None:
        if not self._skipped:
            self._parts.append(data)

    def end(self) -> None:
        text, self._parts = "".join(self._parts), []
        self.paragraphs.append(text.strip("\n") if self._pre else " ".join(text.split()))


def paragraphs(name: str, content: bytes) -> list[str]:
    """Those of a file, in their order; none for a kind of file that is no text."""
    if name.endswith((".gz", ".dz")):
        content, name = gzip.decompress(content), name[:-3]
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError:
        text = content.decode("latin-1")
    if re.search(r"\.x?html?$", name):
        page = Text()
        page.feed(text)
        page.end()
        return page.paragraphs
    if re.search(r"\.(txt|rst|md|dict|info(-\d+)?|text|raw)$|/[A-Z]{5,}$", name):
        text = re.sub(r"\x1f[^\n]*\n[^\n]*", "\n", text)  # the node lines of an info file
        return [part.strip("\n").rstrip() for part in re.split(r"\n[ \t]*\n", text)]
    return []


def prose(paragraph: str) -> bool:
    """Whether a paragraph reads as English sentences."""
    if len(paragraph) < SHORTEST or OTHER.search(paragraph) or MARKUP.search(paragraph):
        return False
    letters = sum(map(str.isalpha, paragraph))
    words = len(paragraph.split())
    return letters > 0.6 * len(paragraph) and len(COMMON.findall(paragraph)) >= max(2, 0.12 * words)


def files(folder: Path) -> Iterator[Path]:
    """Those with text. Where Sphinx left its sources beside the pages, the sources alone."""
    sources = {path.parent for path in folder.rglob("_sources") if path.is_dir()}
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() or not path.is_file() or path.stat().st_size > 64 * 2**20:
            continue
        if path.name in ("copyright", "changelog.gz", "changelog.Debian.gz", "NEWS.gz"):
            continue
        inside = next((tree for tree in sources if tree in path.parents), None)
        if inside is None or inside / "_sources" in path.parents:
            yield path


def documents(folder: Path) -> Iterator[list[tuple[str, bytes]]]:
    """The paragraphs of an unpacked package's files, each with its key."""
    for path in files(folder):
        try:
            yield [(part, key(part)) for part in paragraphs(path.name, path.read_bytes()) if prose(part)]
        except (OSError, EOFError, ValueError, AssertionError, zlib.error):
            continue


def unseen(document: list[tuple[str, bytes]], seen: set[bytes]) -> str:
    """The text of a document without the paragraphs that are `seen`, which grows."""
    new = []
    for part, name in document:
        if name not in seen:
            seen.add(name)
            new.append(part)
    return "\n\n".join(new)


class Package(NamedTuple):
    """What is taken out of a package: its version, the paragraphs of its files, and its licences."""

    version: str
    documents: list[list[tuple[str, bytes]]]
    licences: list[str]


def unpacked(package: str, debs: Path) -> Package | None:
    """Take the text out of a downloaded package; None if there is no such package."""
    found = max(debs.glob(f"{package}_*.deb"), default=None)
    if found is None:
        return None
    with tempfile.TemporaryDirectory() as home:
        subprocess.run(["dpkg-deb", "-x", str(found), home], check=True)
        texts = list(documents(Path(home)))
        names = licences(Path(home), debs) if any(texts) else []
    return Package(found.name.split("_")[1].replace("%3a", ":"), texts, names)


def packages(names: list[str], debs: Path) -> Iterator[tuple[str, Package | None]]:
    """Every package in order. Downloads run ahead, and every core takes the text out of one package."""
    spawned = multiprocessing.get_context("spawn")  # a forked process may hold a download's pipe open: both would wait
    with ThreadPoolExecutor(4) as network, ProcessPoolExecutor(mp_context=spawned) as cores:
        downloads = deque((name, network.submit(downloaded, name, debs)) for name in names)
        running: deque[tuple[str, Future[Package | None]]] = deque()
        while downloads or running:
            while downloads and len(running) < 8:  # paragraphs that wait take memory
                name, download = downloads.popleft()
                download.result()
                running.append((name, cores.submit(unpacked, name, debs)))
            name, package = running.popleft()
            yield name, package.result()


def key(paragraph: str) -> bytes:
    """What is equal for paragraphs that differ in white space alone."""
    return hashlib.blake2b(" ".join(paragraph.split()).encode(), digest_size=12).digest()


def keys(path: Path) -> set[bytes]:
    """Those of all paragraphs of a text."""
    with path.open(encoding="utf-8") as file:
        return {key(part) for line in file for part in json.loads(line)["text"].split("\n\n")}


def beginning(text: str) -> str:
    """The first `BEGINNING` characters, up to the end of a word."""
    return text if len(text) <= BEGINNING else text[:BEGINNING].rsplit(None, 1)[0]


def licences(folder: Path, debs: Path) -> list[str]:
    """The names in an unpacked package's copyright file, which may be that of a package it depends on."""
    for path in sorted(folder.glob("usr/share/doc/*")):
        if path.is_symlink():
            with tempfile.TemporaryDirectory() as home:
                subprocess.run(["dpkg-deb", "-x", str(downloaded(path.readlink().name, debs)), home], check=True)
                return licences(Path(home), debs)
    for path in sorted(folder.glob("usr/share/doc/*/copyright")):
        text = path.read_text(encoding="utf-8", errors="replace")
        if named := LICENCE_FIELD.findall(text) or LICENCE_NAME.findall(text):
            return sorted(set(named))
        if "Permission is" in text:
            return ["a permission notice of its own, to copy and to change"]
    raise SystemExit(f"{folder} must be a copyright file that names a licence, found none; leave the package out")


def downloaded(package: str, debs: Path) -> Path | None:
    """The file of a package in the folder `debs`, downloaded if it is not there yet: of the recorded version while the
    mirror has it, else the newest. None for no package."""
    version = recorded_versions().get(package)
    for wanted in (*([f"{package}={version}"] if version else []), package):
        if not list(debs.glob(f"{package}_*.deb")):
            subprocess.run(["apt-get", "download", "-q", wanted], cwd=debs, capture_output=True)
    return max(debs.glob(f"{package}_*.deb"), default=None)


@cache
def recorded_versions() -> dict[str, str]:
    """The version of each package whose text the records of ResBench have."""
    found = [json.loads(Path(__file__).with_name(name).read_text(encoding="utf-8")) for name in RECORDS]
    return {name: package["version"] for record in found for name, package in record["packages"].items()}


def checks(path: Path) -> dict[str, float]:
    """Measure how clean the text is: shares of its characters and paragraphs, and how far zlib packs it.

    Raises:
        SystemExit: more than what is left over in passing is no plain prose.
    """
    beginnings: Counter[str] = Counter()
    documents = paragraphs = characters = plain = tags = packed = 0
    with path.open(encoding="utf-8") as file:
        for line in file:
            text = json.loads(line)["text"]
            parts = text.split("\n\n")
            documents, paragraphs, characters = documents + 1, paragraphs + len(parts), characters + len(text)
            plain += len(text.encode("ascii", "ignore"))
            tags += sum(TAG.search(part) is not None for part in parts)
            beginnings.update(part[:50] for part in parts)
            packed += len(zlib.compress(text.encode()))
    found = {
        "documents": documents,
        "paragraphs": paragraphs,
        "ascii characters": plain / characters,
        "paragraphs with a tag": tags / paragraphs,
        "paragraphs that begin as three others do": sum(n for n in beginnings.values() if n > 3) / paragraphs,
        "zlib": packed / characters,
    }
    if found["ascii characters"] < 0.998 or found["paragraphs with a tag"] > 1e-3 or found["zlib"] < 0.2:
        raise SystemExit(f"{path} must be clean text, measured {found}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--debs", type=Path, help="a folder that keeps the downloaded packages")
    parser.add_argument("--without", type=Path, metavar="FILE", help="make the second text, without what this one has")
    arguments = parser.parse_args()
    seen = set() if arguments.without is None else keys(arguments.without)
    lines, documents = hashlib.sha256(), hashlib.sha256()
    size, facts, missing = 0, {}, []
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    with arguments.out.open("wb") as out, tempfile.TemporaryDirectory() as temporary:
        debs = (arguments.debs or Path(temporary) / "debs").resolve()
        debs.mkdir(parents=True, exist_ok=True)
        for name, package in packages(PACKAGES if arguments.without is None else FURTHER, debs):
            if package is None:
                missing.append(name)
                continue
            texts = [text for document in package.documents if len(text := unseen(document, seen)) >= SHORTEST_DOCUMENT]
            if arguments.without is not None:
                chosen = [texts[number * len(texts) // MOST] for number in range(MOST)] if texts[MOST:] else texts
                texts = [beginning(text) for text in chosen]
            characters = sum(map(len, texts))
            for text in texts:
                line = (json.dumps({"text": text}, ensure_ascii=False) + "\n").encode()
                lines.update(line)
                documents.update(text.encode() + b"\0")  # as `residua prepare` reads them
                out.write(line)
            if characters:
                facts[name] = {"version": package.version, "characters": characters, "licences": package.licences}
            size += characters
            recorded = recorded_versions().get(name, package.version)
            other = "" if recorded == package.version else f" (the records have {recorded})"
            print(f"{name} {package.version}{other}: {characters:,} characters, {size:,} in all", flush=True)
    if not size:
        raise SystemExit("no text was found: apt-get must be able to download packages (run apt-get update)")
    record = {
        "characters": size,
        "sha256": lines.hexdigest(),
        "documents_sha256": documents.hexdigest(),
        "checks": checks(arguments.out),
        "not found": missing,
        "packages": facts,
    }
    arguments.out.with_suffix(".facts.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
