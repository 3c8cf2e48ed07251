import json
import sys
import types

import pytest
import torch
from torch import nn

from benchmarks import peers
from benchmarks.__main__ import run as run_benchmark
from benchmarks.adapters import PEERS
from benchmarks.peers import PeerSettings, benchmark, chains
from residua.testing.checks import run
from residua.testing.module import CHECKS
from support.tolerances import assert_close

TINY = {"layers": 1, "dim": 16, "sequence_length": 4, "batch_size": 1, "rounds": 2, "warmup": 1}


def command(*arguments):
    """Run `python -m benchmarks peers` at a tiny size."""
    sizes = [text for name, value in TINY.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    return run_benchmark(["peers", *sizes, *arguments])


class Right(nn.Module):
    """Depth attention as the package attn-res has it: a query, and keys of length sqrt(dim)."""

    def __init__(self, dim, eps):
        super().__init__()
        self.pseudo_query, self.eps = nn.Parameter(torch.zeros(dim)), eps

    def forward(self, sources):
        keys = self.normed(sources)
        return ((keys @ self.pseudo_query).softmax(0).unsqueeze(-1) * self.values(sources)).sum(0)

    def normed(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)

    def values(self, sources):
        return sources


class NormalisedValues(Right):
    def values(self, sources):
        return self.normed(sources)


@pytest.fixture
def installed(monkeypatch):
    """Install a module as the AttnResOperator of the package attn-res."""
    return lambda kind: monkeypatch.setitem(sys.modules, "attn_res", types.SimpleNamespace(AttnResOperator=kind))


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_correct_peer_is_timed_against_residua(installed, precision, tmp_path, capsys):
    installed(Right)
    out = tmp_path / "out.jsonl"
    assert command("--packages", "attn-res", "--precision", precision, "--out", str(out), "--json") == 0
    (record,) = [json.loads(line) for line in out.read_text().splitlines()]
    assert json.loads(capsys.readouterr().out) == [record]
    assert (record["package"], record["preset"], record["agrees"]) == ("attn-res", "attnres", True)
    assert record["seconds"].keys() == record["median_seconds"].keys() == {"ours", "theirs"}
    assert record["kept_vectors"]["theirs"] > record["kept_vectors"]["ours"] > 0
    assert record.keys() >= {"ratio", "failed", "clock", "settings", "commit", "residua", "torch", "device", "date"}


def test_a_peer_that_computes_something_else_is_named_and_has_no_speed(installed, capsys):
    installed(NormalisedValues)
    result = benchmark(PeerSettings(packages=("attn-res",), **TINY))
    (one,) = result.results
    assert "the values are normalised" in one.wrong
    assert one.timing is None
    assert "seconds" not in one.record()
    (note,) = result.notes
    assert note.startswith("attn-res")
    assert "does not compute what the paper of attnres says" in note
    assert command("--packages", "attn-res") == 0
    assert capsys.readouterr().out.splitlines()[2].split() == ["attn-res", "AttnResOperator", "attnres", "no"]


def test_a_peer_whose_mapping_is_bfloat16_is_timed_with_a_note(installed):
    class Narrow(Right):
        def forward(self, sources):
            with torch.autocast("cpu", torch.bfloat16, enabled=torch.is_autocast_enabled("cpu")):
                return (torch.einsum("d, nbtd -> nbt", self.pseudo_query, self.normed(sources)).softmax(0)
                        .unsqueeze(-1) * sources).sum(0)  # fmt: skip

    installed(Narrow)
    result = benchmark(PeerSettings(packages=("attn-res",), **TINY))
    assert result.results[0].timing is not None
    assert "computed in bfloat16 under autocast" in result.notes[0]


def test_each_unusable_path_gives_a_one_line_message(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "attn_res", None)
    monkeypatch.setitem(sys.modules, "mhc", None)
    assert command("--packages", "attn-res", "liger-kernel", "mhc") == 0
    said = capsys.readouterr().err.splitlines()
    assert said == [
        "liger-kernel, LigerMHC: left out, it needs a CUDA device",
        "mhc, MHCSkip: left out, no module called mhc (pip install mhc)",
        "attn-res, AttnResOperator: left out, no module called attn_res (pip install attn-res)",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: f"{peer.package}-{peer.name}")
def test_installed_peers_match_the_table(peer):
    """If the packages are installed, their adapters fit, and only the peers that differ are marked `differs`."""
    module, reason = peer.imported("cpu")
    if module is None:
        pytest.skip(f"{peer.package}: {reason}")
    report = run(CHECKS, peer.adapter(module, "cpu"))
    wrong = {name: words for name, words in report.failed.items() if name in peers.GATE}
    assert bool(wrong) == bool(peer.differs), wrong
    if not wrong:
        both = chains(peer.adapter(module, "cpu"), PeerSettings(**TINY))
        ours, theirs = (torch.utils._pytree.tree_leaves(chain.after()) for chain in both.values())
        for one, other in zip(theirs, ours, strict=True):
            assert_close(one, other)
