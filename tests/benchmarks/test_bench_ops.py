import json
from dataclasses import replace

import pytest
import torch

from benchmarks import ops
from benchmarks.__main__ import run as run_benchmark
from benchmarks.cases import CASES, CONNECTIONS, Draw, Sizes, make
from benchmarks.ops import OpSettings, benchmark, check, model_bytes
from residua.errors import RunError

TINY = {"tokens": (12,), "dims": (16,), "channels": (4,), "sequence_length": 6, "rounds": 2, "warmup": 1}


def settings(*operations, **changes):
    return OpSettings(operations=operations, **{**TINY, **changes})


def command(*arguments):
    """Run `python -m benchmarks ops` at a tiny size."""
    sizes = "--tokens 12 --dims 16 --channels 4 --sequence-length 6 --rounds 2 --warmup 1"
    return run_benchmark(["ops", *sizes.split(), *arguments])


@pytest.fixture
def small_caches(monkeypatch):
    """Without emptying the caches of the machine, which takes longer than all else."""
    monkeypatch.setattr(ops, "cold", lambda clock, device: clock)


pytestmark = pytest.mark.usefixtures("small_caches")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_operation_passes_the_check(dtype):
    result = benchmark(settings(*CASES, *CONNECTIONS, dtypes=(dtype,), rounds=1, warmup=0))
    ours = [one for one in result.results if one.implementation == "auto"]
    assert [one.operation for one in ours[::2]] == [*CASES, *CONNECTIONS]
    assert {one.kind for one in ours} == {"forward", "forward+backward"}
    errors = {one.operation: one.error for one in ours if one.operation != "sinkhorn"}
    low, high = {"float32": (1e-9, 1e-6), "bfloat16": (1e-4, 1e-2), "float16": (1e-5, 2e-3)}[dtype]
    assert all(low < error < high for error in errors.values()), errors


@pytest.mark.parametrize("operation", ["delta_write", "causal_read", "connection:ddl-cc", "connection:attnres"])
@pytest.mark.parametrize("sequences", [1, 2, 17])
def test_checking_in_parts_equals_checking_the_whole(operation, sequences):
    sizes = Sizes(6 * sequences, 6, 8, 3, "float32")
    case = make(operation, sizes, Draw(sizes, torch.device("cpu"), 0))
    for leaf in case.leaves():
        leaf.requires_grad_()
    grads = [torch.randn_like(result) for result in case()]
    whole = case.part(0, sequences)
    assert len(whole.leaves()) == len(case.leaves())
    assert 0 < check(case, case, grads) < 1e-5
    assert check(case, replace(case, inputs={k: x * 1.001 for k, x in case.inputs.items()}), grads) > 1e-4


def wrong(fault):
    """A delta write whose result, or whose gradient for k, is a little off at the last token."""
    right = CASES["delta_write"]

    class Off(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            grad = grad.clone()
            grad[-1, -1] *= 1.01
            return grad

    def build(sizes, draw):
        case = right(sizes, draw)

        def function(**inputs):
            if inputs["state"].dtype == torch.float64:
                return case.function(**inputs)
            if fault == "gradient":
                return case.function(**{**inputs, "k": Off.apply(inputs["k"])})
            result = case.function(**inputs)
            return result * 1.001 if fault == "result" else result / 0

        return replace(case, function=function)

    return build


@pytest.mark.parametrize("fault", ["result", "gradient", "infinite"])
def test_no_speed_is_reported_for_a_wrong_operation(monkeypatch, capsys, tmp_path, fault):
    monkeypatch.setitem(CASES, "delta_write", wrong(fault))
    with pytest.raises(RunError, match=r"^delta_write, reference, float32 must be "):
        command("--operations", "delta_write", "--implementations", "reference", "--out", str(tmp_path / "out.jsonl"))
    assert capsys.readouterr().out == ""
    assert (tmp_path / "out.jsonl").read_text() == ""


def test_the_byte_count_covers_every_token_and_both_passes():
    sizes = Sizes(1000, 10, 64, 4, "bfloat16")
    forward = 1000 * (2 * 4 * 64 * 2 + 64 * 2 + 5 * 4)
    assert model_bytes("delta_write", sizes, "forward") == forward
    assert model_bytes("delta_write", sizes, "forward+backward") == forward + 1000 * (
        3 * 4 * 64 * 2 + 2 * 64 * 2 + 10 * 4
    )
    assert model_bytes("connection:residual", sizes, "forward") == 1000 * 4 * 64 * 2
    assert model_bytes("connection:mhc", sizes, "forward") == model_bytes("boundary", sizes, "forward")
    # Three sources, y in and out, x out; backward three gradients are added up.
    assert model_bytes("connection:attnres", sizes, "forward") == 1000 * (3 + 3) * 64 * 2
    assert model_bytes("connection:attnres", sizes, "forward+backward") == 1000 * (6 + 9 + 3) * 64 * 2
    assert model_bytes("connection:attnres:block_size=2", sizes, "forward") == 1000 * (2 + 3) * 64 * 2


def test_records_are_complete(tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    operations = ("--operations", "stream_read", "hyper_read", "--implementations", "auto", "reference")
    assert command(*operations, "--dtypes", "float32", "bfloat16", "--out", str(out), "--json") == 0
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert json.loads(capsys.readouterr().out) == records
    assert len(records) == 2 * 2 * 2 * 2
    record = records[1]
    assert (record["operation"], record["implementation"], record["runs"]) == ("stream_read", "auto", "reference")
    assert (record["tokens"], record["dim"], record["channels"], record["dtype"]) == (12, 16, 4, "float32")
    assert record["pass"] == "forward+backward"
    assert record["model_bytes"] == 12 * 16 * 4 * (4 + 1 + 2 * 4 + 1)
    assert record["bytes_per_second"] == pytest.approx(record["model_bytes"] / record["median_seconds"])
    assert record["share_of_copy"].keys() == {"lower", "median", "upper"}
    assert record["speedup_over_reference"] > 0
    assert len(record["seconds"]) == 2
    assert record["clock"] == "cold process_clock"
    assert record.keys() >= {"benchmark", "error", "commit", "residua", "torch", "device", "date", "settings"}


def test_the_share_is_relative_to_the_copy_in_the_same_round(monkeypatch):
    seconds = iter([1.0, 2.0, 4.0, 8.0, 6.0, 3.0])  # forward, both, copy, and the second round the other way
    monkeypatch.setattr(ops, "cold", lambda clock, device: lambda call: next(seconds))
    forward, both = benchmark(settings("rms_norm", warmup=0)).results
    copied, tokens = 2 * 12 * 4 * 16 * 4, 12 * 16 * 4
    assert forward.share_of_copy().median == pytest.approx((2 * tokens / copied) * (4 / 1 + 8 / 3) / 2)
    assert both.share_of_copy().median == pytest.approx((5 * tokens / copied) * (4 / 2 + 8 / 6) / 2)


def test_an_operation_without_a_kernel_is_skipped_with_one_line(capsys):
    assert command("--operations", "rms_norm", "hybrid", "--implementations", "reference", "triton") == 0
    printed = capsys.readouterr()
    assert [line.split()[0] for line in printed.out.splitlines()[2:]] == ["rms_norm", "rms_norm", "hybrid", "hybrid"]
    assert printed.err.splitlines() == ["rms_norm has no kernel", "hybrid has no kernel"]


def test_each_record_is_written_before_the_next_is_measured(tmp_path, monkeypatch):
    out, seen = tmp_path / "out.jsonl", []
    real = ops._measure

    def measure(operation, *rest):
        seen.append(len(out.read_text().splitlines()))
        if operation == "rms_norm":
            raise KeyboardInterrupt
        return real(operation, *rest)

    monkeypatch.setattr(ops, "_measure", measure)
    with pytest.raises(KeyboardInterrupt):
        command(
            "--operations", "hyper_read", "sinkhorn", "rms_norm", "--implementations", "reference", "--out", str(out)
        )
    assert seen == [0, 2, 4]
    assert [json.loads(line)["operation"] for line in out.read_text().splitlines()[::2]] == ["hyper_read", "sinkhorn"]
