"""The model testers of transformers, which its own models pass, for any causal language model.

They are not in its wheel. The source archive of the installed version has `ModelTesterMixin`; it comes from the package
index, once, and stays in the user's cache. `TRANSFORMERS_TESTS` names the folder `tests` of a checkout instead, which
has `GenerationTesterMixin` and `CausalLMModelTest` too.
"""

import hashlib
import importlib
import io
import json
import os
import sys
import tarfile
import traceback
import unittest
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest
import torch
import transformers
from transformers.models.auto import modeling_auto

PACKAGE = "transformers_testers"  # what their package `tests` is called here, where `tests` is ours
ABSENT_FROM_THE_ARCHIVE = ("exporters", "exporters.test_export", "generation", "generation.test_utils")
INDEX = os.environ.get("PIP_INDEX_URL", "https://pypi.org/simple").rstrip("/")
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "residua"
BATCH, LENGTH, VOCAB, WIDTH, LAYERS, HEADS = 13, 7, 99, 32, 2, 2
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": 37,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def folder() -> Path:
    """Return the folder of the testers. Raises OSError or ValueError if they cannot be had."""
    if "TRANSFORMERS_TESTS" in os.environ:
        return Path(os.environ["TRANSFORMERS_TESTS"])
    name = f"transformers-{transformers.__version__}"
    kept = CACHE / name / "tests"
    if not kept.exists():
        partial = kept.with_name(f"tests-{os.getpid()}")
        partial.mkdir(parents=True, exist_ok=True)
        with tarfile.open(fileobj=io.BytesIO(_source_archive(f"{name}.tar.gz"))) as archive:
            for member in archive:
                path = Path(member.name)
                if path.parent == Path(name, "tests") and path.suffix == ".py":
                    (partial / path.name).write_bytes(archive.extractfile(member).read())
        partial.replace(kept)
    return kept


def _source_archive(name: str) -> bytes:
    """Download an archive of transformers from the index, and compare its hash with the index's."""
    ask = urllib.request.Request(f"{INDEX}/transformers/", headers={"Accept": "application/vnd.pypi.simple.v1+json"})
    with urllib.request.urlopen(ask, timeout=30) as answer:
        files = {file["filename"]: file for file in json.load(answer)["files"]}
        if name not in files:
            raise ValueError(f"{INDEX} has no {name}")
        url = urllib.request.urljoin(answer.url, files[name]["url"])
    with urllib.request.urlopen(url, timeout=60) as answer:
        content = answer.read()
    if hashlib.sha256(content).hexdigest() != files[name]["hashes"]["sha256"]:
        raise ValueError(f"{name}: its hash is not the one that {INDEX} states")
    return content


class _Empty(ModuleType):
    """A module that the archive lacks: its mixins have no tests."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class _NoMarks:
    """In the place of `pytest.mark`, which refuses marks that are not ours: unittest knows none."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **_: args[0] if len(args) == 1 and callable(args[0]) else lambda test: test


@contextmanager
def _imported_as_tests(package: ModuleType) -> Iterator[None]:
    """Some of their modules import `tests.` by name."""
    ours = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "tests"}
    with patch.dict(sys.modules), patch.object(pytest, "mark", _NoMarks()):
        for name in ours:
            del sys.modules[name]
        sys.modules["tests"] = package
        yield
        theirs = {name: module for name, module in sys.modules.items() if name.split(".")[0] != "tests"}
    sys.modules.update(theirs)


def bases() -> tuple[type, ...]:
    """Return the bases of a test class for one model. Raises OSError or ValueError if they cannot be had."""
    found = folder()
    package = sys.modules.setdefault(PACKAGE, ModuleType(PACKAGE))
    package.__path__ = [str(found)]
    for name in ABSENT_FROM_THE_ARCHIVE:
        if not (found / name.split(".")[0]).exists():
            sys.modules.setdefault(f"{PACKAGE}.{name}", _Empty(f"{PACKAGE}.{name}"))
    with _imported_as_tests(package):
        if (found / "causal_lm_tester.py").exists():
            return (importlib.import_module(f"{PACKAGE}.causal_lm_tester").CausalLMModelTest,)
        modeling = importlib.import_module(f"{PACKAGE}.test_modeling_common")
    # This one wants the testers of generation in the class.
    return (type("ModelTests", (modeling.ModelTesterMixin,), {"test_generation_tester_mixin_inheritance": None}),)


class ModelTester:
    """What the testers ask about a model: its sizes, a configuration and a batch."""

    batch_size, seq_length, is_training = BATCH, LENGTH, True
    vocab_size, hidden_size, num_hidden_layers, num_attention_heads = VOCAB, WIDTH, LAYERS, HEADS
    sequence_classification_class = token_classification_class = question_answering_class = None
    base_model_class: type
    causal_lm_class: type
    config_class: type
    options: dict[str, Any]

    def __init__(self, parent: unittest.TestCase):
        self.parent = parent
        self.all_model_classes = (self.base_model_class, self.causal_lm_class)

    def get_config(self) -> Any:
        return self.config_class(**SIZES, **self.options)

    def prepare_config_and_inputs(self) -> tuple[Any, dict[str, torch.Tensor]]:
        ids = torch.randint(VOCAB, (BATCH, LENGTH))
        return self.get_config(), {"input_ids": ids, "attention_mask": torch.ones_like(ids).tril()}

    prepare_config_and_inputs_for_common = prepare_config_and_inputs

    def create_and_check_model(self, config: Any, inputs: dict[str, torch.Tensor]) -> None:
        hidden = self.base_model_class(config).eval()(**inputs).last_hidden_state
        assert hidden.shape == (BATCH, LENGTH, WIDTH)


def test_case(config_class: type, model_class: type, head_class: type, **options: Any) -> type[unittest.TestCase]:
    """Return the test class of a model: `model_class` alone, and with the language-model head, `head_class`.

    options: arguments of `config_class` other than the sizes.
    """
    classes = {"config_class": config_class, "base_model_class": model_class, "causal_lm_class": head_class}
    tester = type("Tester", (ModelTester,), {**classes, "options": options})
    testers = bases()

    class Case(*testers, unittest.TestCase):
        all_model_classes = (model_class, head_class)
        model_tester_class = tester
        pipeline_model_mapping = {}
        _torch_compile_train_cls = head_class

        def setUp(self) -> None:
            self.model_tester = tester(self)
            if hasattr(testers[0], "setUp"):
                super().setUp()
            # Testers look a class up by name to know whether it takes labels.
            names = {"MODEL_MAPPING_NAMES": model_class, "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES": head_class}
            for mapping, cls in names.items():
                patcher = patch.dict(getattr(modeling_auto, mapping), {config_class.model_type: cls.__name__})
                patcher.start()
                self.addCleanup(patcher.stop)

    return Case


class Outcome(unittest.TestResult):
    """What came of the tests, by name: `failed` with the traceback, `skipped_for` with the reason; and `left_out`."""

    left_out: list[unittest.TestCase]

    def __init__(self) -> None:
        super().__init__()
        self.failed: dict[str, str] = {}
        self.skipped_for: dict[str, str] = {}

    def addSubTest(self, test: unittest.TestCase, subtest: unittest.TestCase, error: Any) -> None:
        if error is not None:
            self.addError(test, error)

    def addSkip(self, test: Any, reason: str) -> None:
        self.skipped_for[_name(test)] = reason

    def addError(self, test: Any, error: Any) -> None:
        if issubclass(error[0], pytest.skip.Exception):
            self.addSkip(test, str(error[1]))
        else:
            self.failed[_name(test)] = "".join(traceback.format_exception(*error))

    addFailure = addError


def _name(test: Any) -> str:
    return getattr(test, "test_case", test)._testMethodName


def run(case: type[unittest.TestCase], leave_out: str | None = None) -> Outcome:
    """Run the tests of a case but those whose names begin with `leave_out`."""
    outcome = Outcome()
    tests = list(unittest.defaultTestLoader.loadTestsFromTestCase(case))
    outcome.left_out = [test for test in tests if leave_out and _name(test).startswith(leave_out)]
    unittest.TestSuite(test for test in tests if test not in outcome.left_out).run(outcome)
    return outcome
