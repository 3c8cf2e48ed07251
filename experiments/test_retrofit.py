"""The experiment on a pretrained model: what its records and tables say, and how the model is unpacked."""

import json

import pytest
import torch

from support.pages import RESBENCH, script


@pytest.fixture(scope="module")
def smollm2():
    return script("smollm2")


@pytest.fixture(scope="module")
def results():
    return script("retrofit_results")


def curve(*losses):
    return [{"step": step, "loss": loss} for step, loss in zip((16, 24, 32), losses)]


def test_at_equal_seconds_the_curve_is_read_where_the_baseline_ends(results):
    assert results._at(curve(4.0, 3.0, 2.5), 28) == 2.75
    assert results._at(curve(4.0, 3.0, 2.5), 32) == 2.5
    assert results._at(curve(4.0, 3.0, 2.5), 12) is None
    runs = {seed: {"steps": 32, "curve": curve(4.0, 3.0, 2.0)} for seed in (0, 1)}
    assert results._at_equal_seconds(runs, {0: 2.5, 1: 2.0}, 32 / 28).mean == pytest.approx(0.25)
    assert results._at_equal_seconds(runs, {0: 2.5, 1: 2.0}, 0.9).mean == pytest.approx(-0.25)
    assert results._at_equal_seconds(runs, {0: 2.5, 1: 2.0}, 3.0) is None


def test_a_scheme_is_better_only_if_the_interval_over_seeds_excludes_zero(results):
    from residua.lab.records.statistics import Estimate

    empty = results.Row("all", "", 32, 3, 0, None, None, Estimate.of([1.0]), None, None, None, None)
    values = {"a": [-0.10, -0.11, -0.105], "b": [0.10, 0.11, 0.105], "c": [-0.1, 0.2, 0.05], "d": [-0.4]}
    rows = [empty._replace(scheme=name, tokens=Estimate.of(found)) for name, found in values.items()]
    assert results.sides(rows, "tokens") == (["a"], ["b"], ["c", "d"])
    assert results.sides(rows, "seconds") == ([], [], ["a", "b", "c", "d"])


def test_the_committed_records_are_of_one_model_and_one_corpus(results):
    settings = json.loads((results.FOLDER / "settings.json").read_text())
    corpus = json.loads((RESBENCH / "corpus.json").read_text())["sha256"]
    assert settings["corpus_sha256"] == corpus
    assert settings["gguf_sha256"] == script("smollm2").SHA256
    for row in results.read():
        assert (row["gguf_sha256"], row["corpus_sha256"]) == (settings["gguf_sha256"], corpus)
        assert "dirty" not in row["commit"]


def test_schemes_that_preserve_change_no_logit_beyond_float64_rounding_and_others_give_a_reason(results):
    rows = [row for row in results.read() if row["kind"] == "preserve"]
    assert len(rows) > 30
    for row in rows:
        if row["preserves"]:
            assert row["change_float64"] <= 1e-9 * row["largest_logit"], row["scheme"]
            assert row["same_text"], row["scheme"]
        else:
            assert len(row["reason"]) > 30


def tiny_gguf(path):
    """A Llama of one layer with a byte-level tokenizer, as a GGUF file."""
    gguf = pytest.importorskip("gguf", reason="transformers reads GGUF files with the package gguf")
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in {"block_count": 1, "context_length": 32, "embedding_length": 8, "feed_forward_length": 16,
                        "head_count": 2, "head_count_kv": 1, "layer_norm_rms_eps": 1e-5, "rope_dimension_count": 4,
                        "vocab_size": 259}.items():  # fmt: skip
        getattr(writer, f"add_{name}")(value)
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["<s>", "</s>", *bytes_to_unicode().values(), "th"])
    writer.add_token_merges(["t h"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    generator = torch.Generator().manual_seed(0)
    shapes = {"token_embd": (259, 8), "output_norm": (8,), "blk.0.attn_norm": (8,), "blk.0.attn_q": (8, 8),
              "blk.0.attn_k": (4, 8), "blk.0.attn_v": (4, 8), "blk.0.attn_output": (8, 8), "blk.0.ffn_norm": (8,),
              "blk.0.ffn_gate": (16, 8), "blk.0.ffn_up": (16, 8), "blk.0.ffn_down": (8, 16)}  # fmt: skip
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", torch.randn(shape, generator=generator).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file_becomes_a_folder_that_the_auto_classes_open_and_convert_takes(smollm2, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import residua

    tiny_gguf(path := tmp_path / "tiny.gguf")
    source = smollm2.transform(path, tmp_path / "model")
    assert source["gguf_sha256"] == smollm2.file_sha256(path)
    assert json.loads((tmp_path / "model/source.json").read_text()) == source
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert AutoTokenizer.from_pretrained(tmp_path / "model").decode([2 + ord("A") - 33]) == "A"
    read = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name)
    ids = torch.arange(9)[None]
    before = model(ids).logits
    assert torch.equal(before, read(ids).logits)
    assert torch.equal(residua.convert(model, "gated-delta")(ids).logits, before)
    with pytest.raises(smollm2.InputError, match="new or empty folder"):
        smollm2.transform(path, tmp_path / "model")
