"""Export a trained run as a transformers folder: weights, tokenizer, model card, and optionally the code."""

import ast
import json
import re
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from residua import lazy
from residua.conversion.configuration import MODEL_TYPE, ConvertedConfig
from residua.errors import InputError, RunError, first_line, installing
from residua.files.durable import unfinished
from residua.files.reading import read_json, read_text, write_yaml
from residua.lab.data.tokenizer import save_tokenizer
from residua.lab.experiment import OpenRun, open_run
from residua.lab.opening import context_of, quiet
from residua.lab.records import jsonlines
from residua.lab.records.folder import DISK, new_folder, read_facts
from residua.lab.records.provenance import repository
from residua.lab.records.table import cell
from residua.lab.records.terminal import printable

PACKAGE = Path(__file__).parents[1]
MODEL_MODULE = "residua.models.transformer"
# transformers needs one file with all classes. Other modules get their dotted name, with underscores, as file name.
FILES = {MODEL_MODULE: "modeling_residua", "residua.models.configuration": "configuration_residua"}
CLASSES = {"AutoConfig": "ResiduaConfig", "AutoModel": "ResiduaModel", "AutoModelForCausalLM": "ResiduaForCausalLM"}
OPTIONAL = {"triton"}
"""Packages that copied modules import only if they are installed."""

CONVERTED_CODE = "modeling_residua_converted"
CONVERTED_CLASSES = {"AutoConfig": "ConvertedConfig"}
CONVERTED_TEXT = """# The residual connections of this model are residua's, which must be installed.
from residua.conversion.configuration import ConvertedConfig

__all__ = ["ConvertedConfig"]
"""
"""The remote code of a converted model. The model runs its family's code in transformers, which cannot be copied, so
residua must be installed; otherwise transformers raises an error that names residua."""


def export(
    run: str | Path, folder: str | Path, *, checkpoint: int | Literal["best"] | None = None, remote_code: bool = False
) -> Path:
    """Write the model of a run into a new or empty folder; a new one appears only when it is complete.

    The folder holds model.safetensors, config.json, generation_config.json, the tokenizer and README.md, the model
    card. With `remote_code` it also holds code, so that
    `AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)` works without residua; for a converted model
    residua must be installed. Without `remote_code`, `residua.load(folder)` opens the model.

    Raises:
        InputError: `run` is not a run or has no such checkpoint; `folder` is not empty or cannot be made; or, with
            `remote_code`, the scheme is of another package.
        RunError: the disk is full or damaged.
    """
    place = new_folder(folder)
    opened = open_run(run, checkpoint, device="cpu")
    card = model_card(opened, Path(run), name=place.name, remote_code=remote_code)
    with model_folder(place) as temporary:
        save_tokenizer(opened.tokenizer, temporary)
        opened.model.save_pretrained(temporary)
        if remote_code:
            add_code(temporary)
        (temporary / "README.md").write_text(card, encoding="utf-8")
    return Path(folder)


def loading(folder: str | Path, *, remote_code: bool) -> tuple[str, str]:
    """Return the Python code that loads an exported model: an import, and a call."""
    place = _literal(str(folder))
    if not remote_code:
        return "import residua", f"residua.load({place})"
    call = f"AutoModelForCausalLM.from_pretrained({place}, trust_remote_code=True)"
    return "from transformers import AutoModelForCausalLM", call


def _literal(text: str) -> str:
    """Return a text as a literal of Python and YAML, which read JSON's two escapes for an emoji as two characters."""
    return printable(json.dumps(text, ensure_ascii=False))


@contextmanager
def model_folder(place: Path) -> Iterator[Path]:
    """Yield a folder to save a model in, which is renamed to `place` at the end, or removed after an error.

    Raises RunError if the disk is full or damaged, and InputError if the folder cannot be written for another reason.
    """
    try:
        with unfinished(place) as temporary, quiet():
            yield temporary
            mode = (temporary / "config.json").stat().st_mode
            for file in temporary.glob("*.safetensors"):
                file.chmod(mode)  # safetensors makes files readable only by their owner
    except OSError as error:
        reason, kind = error.strerror or first_line(error), RunError if error.errno in (None, *DISK) else InputError
        raise kind(f"{place}: cannot write the model: {reason}; no partial files were left there") from error


def add_code(folder: Path) -> None:
    """Add to the folder of a saved model the code that `trust_remote_code=True` runs.

    Raises:
        InputError: the model is not converted, and its scheme belongs to another package.
        OSError: the folder cannot be written.
    """
    config = folder / "config.json"
    settings = read_json(config)
    # The class of a scheme from another package does not derive from the copied Scheme.
    if package := settings.get("connection", {}).get("package"):
        raise InputError(
            f"remote code needs a scheme of residua, got {settings['connection']['scheme']!r} of the package "
            f"{package!r}, which is not copied; export without remote code, and load the model where residua and "
            f"{package} are installed"
        )
    if settings["model_type"] == MODEL_TYPE:
        entry, classes, code = CONVERTED_CODE, CONVERTED_CLASSES, {CONVERTED_CODE: CONVERTED_TEXT}
    else:
        entry, classes, code = FILES[MODEL_MODULE], CLASSES, model_code()
    for name, text in code.items():
        (folder / f"{name}.py").write_text(text, encoding="utf-8")
    # All classes are in one file, because transformers would load a second copy of all modules for a second file.
    settings["auto_map"] = {auto: f"{entry}.{name}" for auto, name in classes.items()}
    config.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def model_code() -> dict[str, str]:
    """Return the source of all modules that the model needs, by file name: flat, with relative imports.

    The modules are found by following imports from `MODEL_MODULE`. Only their import lines are changed.
    """
    files: dict[str, str] = {}
    queue = [MODEL_MODULE]
    while queue:
        module = queue.pop()
        if _file(module) in files:
            continue
        text = _source(module).read_text(encoding="utf-8")
        lines = text.splitlines()
        for node in sorted(_imports(text), key=lambda node: node.lineno, reverse=True):
            statements, modules = _relative(node)
            indent = " " * node.col_offset
            lines[node.lineno - 1 : node.end_lineno] = [indent + line for line in statements]
            queue += modules
        files[_file(module)] = "\n".join(lines) + "\n"
    return files


def model_card(opened: OpenRun, run: Path, *, name: str, remote_code: bool) -> str:
    """Return the text of README.md: how to load the model, and how it was trained."""
    config = opened.model.config.get_text_config()
    context = context_of(opened.model)
    facts = read_facts(run / "facts.json")
    data = {key: value for key, value in facts.get("data", {}).items() if key != "place"}
    base = getattr(opened.config.model, "base", None)
    settings = _settings(opened, data)
    parameters = opened.model.num_parameters()
    rows = [
        ("connection", _connection(opened)),
        ("size", f"{parameters:,} parameters, {config.num_hidden_layers} layers, width {config.hidden_size}"),
        ("context", f"{context or 'any number of'} tokens, vocabulary {config.vocab_size}"),
        ("trained", f"{opened.step:,} of {opened.config.train.steps:,} steps"),
        *_measured(run, opened),
        *((f"data: {key}", cell(value)) for key, value in data.items()),
        *((key, cell(facts[key])) for key in ("date", "device", "commit", "torch", "transformers") if facts.get(key)),
    ]
    settings = write_yaml(settings).rstrip()
    # The fence must be longer than any run of backticks in the settings.
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", settings)), default=0))
    imports, call = loading(name, remote_code=remote_code)
    complete = remote_code and not isinstance(opened.model.config, ConvertedConfig)
    trust = ", trust_remote_code=True" if remote_code else ""  # also for AutoTokenizer, which reads config.json too
    return f"""{_front_matter(base, data.get("dataset"))}
# {_markdown(name)}

A language model trained with residua: residual connections for PyTorch,
[Deep Delta Learning](https://arxiv.org/abs/2601.00417) and the schemes it is compared with.

```python
{imports}
from transformers import AutoTokenizer

model = {call}  # the path of this folder
tokenizer = AutoTokenizer.from_pretrained({_literal(name)}{trust})
```
{"" if complete else _requirement(remote_code)}
| what | value |
| --- | --- |
{chr(10).join(f"| {_markdown(label)} | {_markdown(value)} |" for label, value in rows)}

The settings of the run:

{fence}yaml
{settings}
{fence}
"""


def converted_card(base: str | Path, connection: str, *, name: str, remote_code: bool) -> str:
    """Return the text of README.md for a model that was converted but not trained."""
    imports, call = loading(name, remote_code=remote_code)
    return f"""{_front_matter(base, None)}
# {_markdown(name)}

{_markdown(base_name(base))} with the residual connection {_markdown(connection)}.
residua converted it, and its connections are not trained.

```python
{imports}

model = {call}  # the path of this folder
```
{_requirement(remote_code)}"""


def _requirement(remote_code: bool) -> str:
    """Return the paragraphs of a card on installing residua, and on opening a folder without remote code."""
    address = repository()
    command = f"pip install 'residua[lab] @ git+{address}'" if address else installing("lab")
    text = f"\nThis model needs residua:\n\n    {command}\n"
    if not remote_code:
        text += (
            "\nThe Auto classes of Transformers open it too if you import residua after Transformers. Without residua "
            "they say that the model type is unknown.\n"
        )
    return text


def base_name(folder: str | Path) -> str:
    """Return the name of the model in a folder: OWNER/NAME in the hub's cache, otherwise the folder's name."""
    path = Path(folder).resolve()
    owner = re.fullmatch(r"models--([^/]+?)--(.+)", path.parts[-3]) if path.parent.name == "snapshots" else None
    return "/".join(owner.groups()) if owner else path.name


def _front_matter(base: str | Path | None, dataset: str | None) -> str:
    """Return the front matter of a card: the base model and its license, if known, and the data set on the hub."""
    lines = ["library_name: transformers", "pipeline_tag: text-generation"]
    if base is not None:
        lines.append(f"base_model: {_literal(base_name(base))}")
        lines += _license(Path(base) / "README.md")
    if dataset:
        lines += ["datasets:", f"- {_literal(dataset)}"]
    return "\n".join(["---", *lines, "tags:", "- residua", "- residual-connections", "---", ""])


def _license(card: Path) -> list[str]:
    """Return the license line of a model card's front matter, as a list of one line; [] if it has none."""
    try:
        text = read_text(card)
    except InputError:
        return []
    front = re.match(r"---\n(.*?)\n---", text, re.DOTALL)
    found = re.search(r"^license: *[\w.-]+ *$", front[1], re.MULTILINE) if front else None
    return [found[0]] if found else []


def _settings(opened: OpenRun, data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a run with the facts of its training data, without local paths."""
    settings = asdict(opened.config)
    settings["data"].pop("path")
    for key in ("source", "tokenizer", "vocab_size", "validation_fraction"):  # a prepared folder has its own values
        settings["data"][key] = data.get(key, settings["data"][key])
    places = [(settings["model"], "base"), (settings["data"], "tokenizer"), (settings["data"], "further_validation")]
    for section, key in places:
        if section.get(key):
            section[key] = base_name(section[key]) if key == "base" else Path(section[key]).name
    return settings


def _markdown(text: str) -> str:
    """Return a text as one line of Markdown, with all Markdown and HTML markup escaped."""
    escaped = re.sub(r"([\\`*_\[\]<>|~&$#])", r"\\\1", printable(text))
    return " ".join(escaped.split())


def _connection(opened: OpenRun) -> str:
    connection = opened.config.model.connection
    return connection if isinstance(connection, str) else json.dumps(connection)


def _measured(run: Path, opened: OpenRun) -> Iterator[tuple[str, str]]:
    """Yield names and values of tokens, seconds and the last validation up to the checkpoint, which may be earlier."""
    yield "tokens seen", f"{opened.step * opened.config.train.tokens_per_step:,}"
    rows = jsonlines.read_metrics(run / "metrics.jsonl")
    evaluated = next((row for row in reversed(rows) if "val_loss" in row and row["step"] <= opened.step), {})
    when = "" if evaluated.get("step") == opened.step else f" after step {evaluated.get('step')}"
    names = {
        "val_loss": ("validation loss", "{:.4f} nats per token"),
        "perplexity": ("perplexity", "{:.2f}"),
        "bits_per_byte": ("bits per byte", "{:.4f}"),
    }
    for key, (label, template) in names.items():
        if evaluated.get(key) is not None:
            yield f"{label}{when}", template.format(evaluated[key])
    yield "seconds of training", f"{opened.checkpoint.seconds:,.0f}"


def _file(module: str) -> str:
    return FILES.get(module) or module.removeprefix("residua.").replace(".", "_")


def _source(module: str) -> Path | None:
    """Return the file of a module of this package, or None. Nothing is imported, because a module may need triton."""
    path = PACKAGE.joinpath(*module.split(".")[1:])
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)


def _imports(text: str) -> Iterator[ast.Import | ast.ImportFrom]:
    """Yield the import statements that must change, at any depth in the module."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            top = node.module.partition(".")[0]
        elif isinstance(node, ast.Import):
            top = node.names[0].name.partition(".")[0]
        else:
            continue
        if top == "residua" or top in OPTIONAL:
            yield node


def _relative(node: ast.Import | ast.ImportFrom) -> tuple[list[str], list[str]]:
    """Return the lines that replace an import, and the modules of this package that these lines need."""
    if isinstance(node, ast.Import) or node.module.partition(".")[0] != "residua":
        # transformers refuses code with a failing import, unless the import is inside a try statement.
        return ["try:", textwrap.indent(ast.unparse(node), "    "), "except ImportError:", "    raise"], []
    names: dict[str, list[str]] = {}  # by the module that defines them
    lines: list[str] = []
    modules: list[str] = []
    for alias in node.names:
        inner = f"{node.module}.{alias.name}"
        if _source(inner) is not None:
            # `from . import name` would not do, because transformers only copies files whose name follows a dot.
            name = alias.asname or alias.name
            lines += [f"from .{_file(inner)} import __name__ as {name}", f"{name} = __import__('sys').modules[{name}]"]
            modules.append(inner)
        else:
            names.setdefault(lazy.offered(node.module).get(alias.name, node.module), []).append(ast.unparse(alias))
    lines += [f"from .{_file(module)} import {', '.join(chosen)}" for module, chosen in names.items()]
    return lines, [*modules, *names]
