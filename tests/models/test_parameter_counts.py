"""Parameter counts of the paper's models, exactly (vocabulary 50304, tied)."""

import pytest
import torch

from residua.models import SIZES, ResiduaConfig, ResiduaForCausalLM
from support.variants import PRESETS

COUNTS = {
    "residual": {"small": 123_590_400, "medium": 353_508_352},
    "ddl": {"small": 123_627_312, "medium": 353_606_752},
    "two-layer gate": {"small": 125_971_248, "medium": 359_855_200},
    "ddl-tc": {"small": 123_842_476, "medium": 354_164_052},
    "ddl-ec": {"small": 123_854_764, "medium": 354_180_436},
    "ddl-cc": {"small": 123_722_668, "medium": 353_856_852},
    "ddl-cc-ec": {"small": 123_734_956, "medium": 353_873_236},
}


def count(connection, **options) -> int:
    with torch.device("meta"):
        model = ResiduaForCausalLM(ResiduaConfig(connection=connection, **options))
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("size", ["small", pytest.param("medium", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", COUNTS)
def test_parameter_counts_are_those_of_the_paper(name, size):
    connection = {"preset": "ddl", "beta_head": "mlp"} if name == "two-layer gate" else name
    assert count(connection, **SIZES[size]) == COUNTS[name][size]


@pytest.mark.parametrize("name", PRESETS)
def test_the_parameters_of_a_model_are_those_of_its_backbone_and_stream(name):
    """At any size: what a scheme adds to the plain model is what its stream holds beyond the plain norms."""
    options = {"vocab_size": 48, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2}
    stream = sum(parameter.numel() for parameter in PRESETS[name].build(16, 6).parameters())
    norms = sum(parameter.numel() for parameter in PRESETS["residual"].build(16, 6).parameters())
    assert count(PRESETS[name], **options) - count("residual", **options) == stream - norms


def test_options_of_the_backbone_add_the_expected_parameters():
    options = {"vocab_size": 48, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2}
    plain = count("residual", **options)
    assert count("residual", tie_word_embeddings=False, **options) - plain == 48 * 16
    assert plain - count("residual", qk_norm=None, **options) == 3 * 2 * 8
    assert count("residual", attention_output_gate=True, **options) - plain == 3 * (16 * 16 + 8)
    assert count("residual", key_value_kernel=4, **options) - plain == 3 * 4 * 2 * 16
