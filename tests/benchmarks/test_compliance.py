"""The compliance page is made from the records, and a row never says more than its record."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from benchmarks import compliance, delta_adapters
from benchmarks.compliance import IMPLEMENTATIONS, in_words, page, read, verdict
from residua.testing.checks import run
from residua.testing.module import CHECKS


def test_the_page_is_made_from_the_records():
    records = read()
    assert list(records) == [one.name for one in IMPLEMENTATIONS]
    assert compliance.PAGE.read_text(encoding="utf-8") == page(list(records.values()))


def test_a_failed_float32_check_has_a_limit_under_autocast():
    for record in read().values():
        assert "under autocast" in record.get("failed", {}).get("float32_mappings", "under autocast")


def record(**changes):
    right = {
        "failed": {},
        "not_checked": {},
        "instead": [],
        "start": "",
        "largest_difference_of_results": 1e-7,
        "largest_difference_of_inputs": 0.0,
        "largest_difference_with_large_parameters": 0.0,
    }
    return right | changes


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "right"),
        ({"failed": {"large_logits": "not finite"}}, "right, with a limit"),
        ({"failed": {"gradients": "2 times ours"}}, "differs"),
        ({"failed": {"forward": "the mixer differs"}, "instead": ["no tokens"]}, "another scheme"),
        ({"not_run": "importing it fails"}, "not checked"),
    ],
)
def test_a_verdict_follows_from_the_checks(changes, expected):
    assert verdict(record(**changes)) == expected


def test_a_verdict_in_words_quotes_the_kit_and_the_largest_difference():
    words = in_words(record(failed={"forward": "the mixer is transposed"}, largest_difference_of_results=0.25))
    assert words == "the kit says: the mixer is transposed; largest difference 0.2 of the largest entry."


@pytest.mark.parametrize(
    ("scheme", "first"),
    [("ManifoldHyperConnections()", "rows"), ("ManifoldHyperConnections(order='columns')", "columns")],
)
def test_a_correct_mhc_is_reported_with_the_order_that_it_follows(scheme, first):
    assert in_words(record(scheme=scheme)).startswith(f"Sinkhorn divides by {first} first")
    assert "Sinkhorn" not in in_words(record(scheme=scheme, failed={"forward": "the mixer is transposed"}))


def test_claims_about_an_implementation_must_hold():
    class Adapter(compliance.adapters.DeepSeekV4):
        def statements(self):
            return {"it mixes nothing": False}

    pytest.importorskip("transformers.models.deepseek_v4")
    deepseek = next(one for one in IMPLEMENTATIONS if one.name == "deepseek-v4")
    with pytest.raises(AssertionError, match=r"^deepseek-v4: "):
        compliance.checked(replace(deepseek, adapter=Adapter))


def test_records_are_json_lines_with_versions():
    for line in compliance.RECORDS.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        assert {"version", "torch", "python", "specification", "attribute"} <= row.keys()


def test_only_the_definitions_of_a_file_are_executed(tmp_path, monkeypatch):
    """Its imports are left out, and its annotations are not computed."""
    monkeypatch.setattr(compliance, "CLONES", tmp_path)
    folder = tmp_path / "somebody+delta@0123456789"
    folder.mkdir()
    text = "import nothing\nclass Delta(nn.Module):\n    def forward(self, x: Missing):\n        return x\nexit(1)\n"
    (folder / "delta.py").write_text(text, encoding="utf-8")
    one = compliance.Implementation(
        "one",
        "somebody/delta",
        "delta.py",
        "Delta",
        "ddl",
        commit="0123456789abcdef",
        definitions={"delta.py": ("Delta",)},
    )
    assert compliance.cloned(one) == folder
    assert compliance.executed(one).Delta()(3) == 3


def test_packages_that_were_read_and_not_run_have_a_version():
    rust = next(one for one in IMPLEMENTATIONS if one.name == "deep-delta-rs")
    row = compliance.checked(rust)
    assert verdict(row) == "not checked"
    assert row["version"] == rust.commit
    assert row["not_run"] == rust.read


@pytest.mark.parametrize(
    ("adapter", "connection", "kit"),
    [
        ("TwiceScaled", "DeltaResidualScalar", "|k| is 0.25 = 1/sqrt(d) and must be 1"),
        ("ConstantGate", "DDLGate", "not along k"),
    ],
)
def test_a_delta_that_differs_from_the_papers_is_named(adapter, connection, kit):
    """The modules are our own reconstructions with the mistakes of two rows, tested through the adapters of these
    rows."""

    class DeltaResidualScalar(torch.nn.Module):
        def __init__(self, dim):
            super().__init__()
            self.k_scale = dim**-0.5
            self.gate = torch.nn.ModuleDict({"norm": torch.nn.RMSNorm(dim, eps=1e-6), "net": torch.nn.Linear(dim, 1)})
            self.gate.forward = lambda x: 2 * self.gate["net"](self.gate["norm"](x)).sigmoid()
            self.w_v = torch.nn.Linear(dim, 1, bias=False)

        def forward(self, x, y):
            k = self.k_scale * torch.nn.functional.normalize(y, dim=-1)
            return x + self.gate(x) * (self.w_v(x).sigmoid() - (k * x).sum(-1, keepdim=True)) * k

    class DDLGate(torch.nn.Module):
        def __init__(self, dim):
            super().__init__()
            self.direction, self.beta = torch.nn.Parameter(torch.ones(dim)), torch.nn.Parameter(torch.tensor(-0.1))

        def forward(self, x, y):
            d = torch.nn.functional.normalize(self.direction, dim=0)
            return x + y + self.beta * (x @ d).unsqueeze(-1) * d

    module = {"DeltaResidualScalar": DeltaResidualScalar, "DDLGate": DDLGate}[connection]
    subject = getattr(delta_adapters, adapter)(SimpleNamespace(**{connection: module}), "cpu")
    assert all(subject.statements().values())
    assert kit in run(CHECKS, subject, {}).failed["forward"]
