"""The experiment on a pretrained model: what a run is, what a kill loses, what its tables say; on a tiny Llama."""

import json

import pytest
import torch

from support.converted_models import save_base
from support.pages import EXPERIMENTS, script

pytestmark = pytest.mark.skipif(not EXPERIMENTS.is_dir(), reason="experiments/ is not in this archive")


@pytest.fixture(scope="module")
def smollm2():
    return script("smollm2")


@pytest.fixture(scope="module")
def results():
    return script("retrofit_results")


@pytest.fixture
def retrofit(monkeypatch):
    """The experiment at a size of milliseconds."""
    module = script("retrofit")
    sizes = {"LENGTH": 8, "TUNING_STEPS": 2, "SEED_STEPS": 8, "VALIDATION": 3, "TUNING": 2, "PRESERVED": 2,
             "SAVE_EVERY": 2, "NEW_TOKENS": 2, "ROUNDS": 1, "RATES": (1e-3, 1e-2, 1e-1), "SCHEMES": ("hc",),
             "TUNED": (("connections", "norms"), ("connections", "hc"), ("all", "residual")),
             "FIRST": {"connections": 1e-2, "all": 1e-2}}  # fmt: skip
    for name, value in sizes.items():
        monkeypatch.setattr(module, name, value)
    presets = {name: module.PRESETS[name] for name in ("ddl", "mhc")}
    monkeypatch.setattr(module, "PRESETS", presets)
    return module


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A Llama with a tokenizer, and a corpus."""
    place = tmp_path_factory.mktemp("retrofit")
    texts = (
        "\n\n".join(f"{i:04d} says {j * i % 7}, then {j} times more of it." for j in range(150)) for i in range(48)
    )
    (place / "corpus.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return save_base(place / "model"), place / "corpus.jsonl"


def records(out):
    return [json.loads(line) for line in (out / "records.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_every_part_is_recorded_once_and_tables_can_be_made(retrofit, results, files, tmp_path):
    command = [*map(str, files), "--out", str(tmp_path), "--steps", "4", "--seeds", "0", "1"]
    assert retrofit.main(command) == 0
    found = {row["key"]: row for row in records(tmp_path)}
    assert sum(row["kind"] == "tune" for row in found.values()) == 9
    assert found["preserve mhc"]["preserves"]
    assert found["preserve mhc"]["change_float64"] < 1e-9
    assert found["preserve mhc"]["same_text"]
    assert "gated-delta" in found["preserve ddl"]["reason"]
    assert {row["corpus_sha256"] for row in found.values()} == {retrofit.file_sha256(files[1])}
    assert all(row["commit"] is not None and row["torch"] == torch.__version__ for row in found.values())

    # What is trained, at which rate: chosen where tuning was best, for the connections over frozen weights.
    tuned = {row["connection_lr"]: row["val_loss"] for key, row in found.items() if "tune connections hc" in key}
    both = found["train all hc 4 1"]
    assert both["connection_lr"] == min(tuned, key=tuned.get)
    assert both["lr"] == found["train all residual 4 1"]["lr"]
    parts = found["train all residual 4 1"], found["train connections hc 4 1"]
    assert both["parameters"] == sum(row["parameters"] for row in parts)

    rows = {(row.mode, row.scheme): row for row in results.rows(found.values())}
    own, plain = rows["all", "hc"], rows["all", "residual"]
    assert (own.seeds, plain.tokens) == (2, None)
    losses = [found[f"train all {name} 4 {seed}"]["val_loss"] for name in ("hc", "residual") for seed in (0, 1)]
    assert own.tokens.mean == pytest.approx((losses[0] + losses[1] - losses[2] - losses[3]) / 2)
    assert own.documents.mean == pytest.approx(own.tokens.mean)

    plain = retrofit.built(retrofit.plain_model(files[0]), "residual", None)
    kept = retrofit.residua.load_connection(plain, tmp_path / "connections/hc-4-1")
    windows = retrofit.opened(files[1], files[0]).validation()
    assert retrofit.evaluate(kept, windows) == found["train connections hc 4 1"]["window_losses"]

    before = (tmp_path / "records.jsonl").read_bytes()
    assert retrofit.main(command) == 0
    assert (tmp_path / "records.jsonl").read_bytes() == before


def run(retrofit, files, mode, scheme, *, place=None, report=lambda step: None):
    rates = 1e-2 if mode == "all" or scheme == "norms" else None, 1e-2 if scheme == "hc" else None
    return retrofit.train(*files, "a run", mode, scheme, rates, 6, 0, place=place, report=report)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["connections", "all"])
def test_a_killed_run_goes_on_to_the_last_bit(mode, retrofit, files, tmp_path):
    class Killed(Exception):
        pass

    def kill(step):
        if step == 5:
            raise Killed

    weights = {name: value.clone() for name, value in retrofit.plain_model(files[0]).state_dict().items()}
    whole = run(retrofit, files, mode, "hc")
    with pytest.raises(Killed):
        run(retrofit, files, mode, "hc", place=tmp_path / "state", report=kill)
    steps = []
    resumed = run(retrofit, files, mode, "hc", place=tmp_path / "state", report=steps.append)
    assert steps[0] == 4
    for name in ("train_losses", "curve", "window_losses", "parameters"):
        assert resumed[name] == whole[name], name
    assert whole["train_losses"][-1] != whole["train_losses"][0]
    assert [point["step"] for point in whole["curve"]] == [3, 5, 6]
    after = retrofit.plain_model(files[0]).state_dict()
    assert all(torch.equal(after[name], value) for name, value in weights.items())


def test_frozen_weights_stay_and_the_gains_of_norms_are_what_the_control_trains(retrofit, files):
    base = retrofit.plain_model(files[0])
    for scheme, own, part in (("hc", None, ".stream."), ("norms", "norm", "norm")):
        model = retrofit.built(base, scheme, own)
        weights, connections = retrofit.trainable(model, "connections", scheme)
        assert (bool(weights), bool(connections)) == (scheme == "norms", scheme == "hc")
        trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        assert trained == {name for name, _ in model.named_parameters() if part in name}
        of_base = {id(parameter) for parameter in base.parameters()}
        assert not of_base & {id(parameter) for parameter in (*weights, *connections)}


def test_no_window_serves_twice_and_each_has_its_own_document(retrofit, files):
    text = retrofit.Text(files[1], files[0])
    judged, tuning = text.tuning()
    parts = [text.validation(), judged, tuning, text.training(0, 8), text.training(1, 3)]
    assert [len(part) for part in parts] == [3, 2, 4, 16, 6]
    assert torch.equal(text.training(0, 2), text.training(0, 8)[:4])
    documents = files[1].read_text().splitlines()
    sources = []
    for row in torch.cat(parts):
        piece = json.dumps(text._tokenizer.decode(row))[1:-1]
        sources += [i for i, line in enumerate(documents) if piece in line]
    assert len(sources) == len(set(sources)) == 31
    with pytest.raises(retrofit.InputError, match=r"must be \d+ documents"):
        text.training(3, 8)


def test_the_search_for_a_learning_rate_ends_inside_the_grid_or_at_its_end(monkeypatch, retrofit):
    monkeypatch.setattr(retrofit, "RATES", (1, 2, 3, 4, 5))
    assert retrofit.waiting({}, 3) == [2, 3, 4]
    assert retrofit.waiting({2: 0.1, 3: 0.2}, 3) == [4]
    assert retrofit.waiting({2: 0.1, 3: 0.2, 4: 0.3}, 3) == [1]
    assert retrofit.waiting({2: 0.2, 3: 0.1, 4: None}, 3) == []
    assert retrofit.waiting({1: 0.0, 2: 0.1, 3: 0.2, 4: 0.3}, 3) == []


def curve(*losses):
    return [{"step": step, "loss": loss} for step, loss in zip((16, 24, 32), losses)]


def test_equal_seconds_reads_the_curve_where_the_baseline_ends(results):
    assert results._at(curve(4.0, 3.0, 2.5), 28) == 2.75
    assert results._at(curve(4.0, 3.0, 2.5), 32) == 2.5
    assert results._at(curve(4.0, 3.0, 2.5), 12) is None
    runs = {seed: {"steps": 32, "curve": curve(4.0, 3.0, 2.0)} for seed in (0, 1)}
    assert results._at_equal_seconds(runs, {0: 2.5, 1: 2.0}, 32 / 28).mean == pytest.approx(0.25)
    assert results._at_equal_seconds(runs, {0: 2.5, 1: 2.0}, 0.9).mean == pytest.approx(-0.25)
    assert results._at_equal_seconds(runs, {0: 2.5, 1: 2.0}, 3.0) is None


def test_a_scheme_is_better_only_where_the_interval_over_seeds_says_so(results):
    from residua.records.statistics import Estimate

    empty = results.Row("all", "", 32, 3, 0, None, None, Estimate.of([1.0]), None, None, None, None)
    values = {"a": [-0.10, -0.11, -0.105], "b": [0.10, 0.11, 0.105], "c": [-0.1, 0.2, 0.05], "d": [-0.4]}
    rows = [empty._replace(scheme=name, tokens=Estimate.of(found)) for name, found in values.items()]
    assert results.sides(rows, "tokens") == (["a"], ["b"], ["c", "d"])
    assert results.sides(rows, "seconds") == ([], [], ["a", "b", "c", "d"])


def test_the_committed_records_are_of_one_model_and_one_corpus(results):
    settings = json.loads((results.FOLDER / "settings.json").read_text())
    corpus = json.loads((EXPERIMENTS / "resbench-corpus.json").read_text())["sha256"]
    assert settings["corpus_sha256"] == corpus
    assert settings["gguf_sha256"] == script("smollm2").SHA256
    for row in results.read():
        assert (row["gguf_sha256"], row["corpus_sha256"]) == (settings["gguf_sha256"], corpus)
        assert "dirty" not in row["commit"]


def test_what_preserves_is_within_float64_and_within_what_float32_gives(results):
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


@pytest.mark.slow
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
