"""transformers' own model testers pass for our models as they do for its Llama; docs/transformers.md has the rest."""

import re
from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel

from residua.lab.opening import quiet
from residua.models import ResiduaConfig, ResiduaForCausalLM, ResiduaModel
from residua.models.cache import StreamLayer
from support import transformers_testers

PAGE = Path(__file__).parents[2] / "docs/transformers.md"
PRESETS = ("ddl-tc", "mhc", "attnres")  # one row and several channels with a memory, streams, a growing tuple


def listed(kind: str) -> dict[str, tuple[str, ...]]:
    """The rows of the page's table of this kind, "fails" or "skipped": the name of a test, and the presets."""
    rows = re.findall(rf"^\| `(test_\w+)` \| {kind} \| (.+?) \| .+ \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    return {name: PRESETS if presets == "all" else tuple(presets.strip("`").split("`, `")) for name, presets in rows}


@pytest.fixture(scope="module", autouse=True)
def silent():
    with quiet():
        yield


@pytest.fixture(scope="module")
def case():
    """Make the test class of a model; without the testers, skip."""
    try:
        transformers_testers.bases()
    except (OSError, ValueError) as error:
        pytest.skip(f"the testers of transformers cannot be had: {error}")
    return transformers_testers.test_case


@pytest.fixture(scope="module")
def llama(case):
    return transformers_testers.run(case(LlamaConfig, LlamaModel, LlamaForCausalLM))


def test_llama_passes_the_testers_of_transformers(llama):
    """A test that fails for Llama here would not count against a model."""
    assert llama.testsRun > 100
    assert llama.failed == {}


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_passes_the_testers_of_transformers(case, llama, preset):
    class Case(case(ResiduaConfig, ResiduaModel, ResiduaForCausalLM, connection=preset)):
        def _check_past_key_values_for_generate(self, batch_size, cache, length, config):
            """The memory of the stream is one layer more, whose states differ in size from part to part."""
            *layers, memory = cache.layers
            if not isinstance(memory, StreamLayer):
                return super()._check_past_key_values_for_generate(batch_size, cache, length, config)
            assert all(x.keys.shape[:3] == (batch_size, config.num_attention_heads, length) for x in layers)
            assert all(len(rows) == batch_size for rows in memory.conv_states.values())

    # Attention knows no scheme, so that one preset is enough for its implementations.
    found = transformers_testers.run(Case, leave_out="test_eager_matches_sdpa" if preset != PRESETS[0] else None)
    assert found.testsRun + len(found.left_out) == llama.testsRun
    known = {name for name, presets in listed("fails").items() if preset in presets and hasattr(Case, name)}
    surprising = {name: text for name, text in found.failed.items() if name not in known}
    assert not surprising, "\n\n".join(f"{name} fails:\n{text}" for name, text in surprising.items())
    assert known - found.failed.keys() == set(), "listed in docs/transformers.md, and passes"
    less = {name: why for name, why in found.skipped_for.items() if name not in llama.skipped_for}
    assert less.keys() == {name for name, presets in listed("skipped").items() if preset in presets}, less
