"""The defects found in the authors' code, each with the test that would catch it here.

Of those that cannot apply to another code base as they stand, the nearest thing that could is tested: an option of
theirs that is refused (6), two paths that must be one function (13), parts that they leave out (21).
"""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]

# number: (the defect, the tests that catch it, each as file::function)
DEFECTS: dict[int, tuple[str, list[str]]] = {
    1: (
        "cached decoding from a prefix shorter than the kernel raises",
        [
            "../src/residua/testing/contract.py::streaming_equals_the_full_pass",
            "models/test_causality_and_padding.py::test_token_by_token_equals_the_full_pass",
            "models/test_generation.py::test_greedy",
        ],
    ),
    2: (
        "embedding convolution with a state kernel of 1: cached decoding silently wrong",
        [
            "models/test_causality_and_padding.py::test_token_by_token_equals_the_full_pass",
            "models/test_causality_and_padding.py::test_the_cache_has_room_for_every_look_back",
        ],
    ),
    3: (
        "padding enters the convolutions, and its token id matters",
        [
            "models/test_causality_and_padding.py::test_left_padding_equals_no_padding",
            "models/test_generation.py::test_ragged_left_padded_batch",
        ],
    ),
    4: (
        "positions counted from the padding",
        [
            "models/test_causality_and_padding.py::test_left_padding_equals_no_padding",
            "models/test_causality_and_padding.py::test_positions_count_from_the_first_real_token",
        ],
    ),
    5: (
        "a cache changed in place: the same call twice differs, no branching",
        [
            "models/test_causality_and_padding.py::test_a_cache_can_be_continued_twice",
            "models/test_generation.py::test_going_on_from_a_kept_cache",
        ],
    ),
    6: (
        "shifted keys and values decode wrongly",
        ["models/test_authors_checkpoints.py::test_options_that_do_not_fit_are_refused"],
    ),
    7: (
        "hidden states while decoding come from a readout without its past",
        ["models/test_outputs.py::test_hidden_states_while_decoding"],
    ),
    8: (
        "no generate(), no beam search",
        [
            "models/test_generation.py::test_beam_search_is_the_same_with_and_without_the_cache",
            "models/test_causality_and_padding.py::test_reordering_a_cache_moves_everything_in_it",
        ],
    ),
    9: (
        "no save and load round trip, no checkpointing, no input embeddings",
        [
            "models/test_saving.py::test_saved_and_loaded",
            "models/test_saving.py::test_tied_weights_are_stored_once",
            "models/test_gradient_checkpointing.py::test_gradients_are_equal_to_the_last_bit",
            "models/test_outputs.py::test_embeddings_instead_of_ids",
        ],
    ),
    10: (
        "labels not shifted, -100 crashes",
        [
            "models/test_outputs.py::test_labels_are_shifted_inside_and_minus_100_does_not_count",
            "models/test_hf_trainer.py::test_a_few_steps_under_the_trainer",
        ],
    ),
    11: (
        "packages for one kind of device imported by all",
        ["models/test_known_defects.py::test_importing_the_models_needs_no_device_package"],
    ),
    12: (
        "channel kernels shorter than d_v accepted and then crashing, the causal flag ignored",
        [
            "connections/test_deep_delta.py::test_equals_the_formulas_of_the_paper",
            "connections/test_connection_options.py::test_a_wrong_option_is_one_clear_line",
        ],
    ),
    13: (
        "eps multiplied by the width, and options ignored, in one of two paths",
        ["connections/test_deep_delta.py::test_the_guard_near_a_vanishing_direction"],
    ),
    14: (
        "float64 is float32 inside",
        [
            "../src/residua/testing/contract.py::float64_from_end_to_end",
            "../src/residua/testing/contract.py::gradients_are_those_of_finite_differences",
            "models/test_outputs.py::test_float64_from_end_to_end",
        ],
    ),
    15: (
        "the gate is cast to float32 after a product in bfloat16",
        [
            "connections/test_contract.py::test_gates_of_a_bfloat16_model_lose_nothing",
            "../src/residua/testing/contract.py::autocast_leaves_the_coefficients_in_float32",
        ],
    ),
    16: (
        "compressors that start far below the eps of the next norm",
        [
            "connections/test_connection_init.py::test_compressors_start_as_the_average_of_the_channels",
            "models/test_model_init.py::test_compressors_average_and_expansion_repeats_through_every_door",
            "models/test_model_init.py::test_the_first_norm_is_not_starved",
        ],
    ),
    17: (
        "constant values keep a projection that nothing uses",
        [
            "connections/test_connection_init.py::test_constant_values_have_no_projection",
            "../src/residua/testing/contract.py::every_parameter_matters_and_gets_a_gradient",
            "models/test_outputs.py::test_every_parameter_matters_and_gets_a_gradient",
        ],
    ),
    18: (
        "output projections that start at zero meet a gradient of 1 / eps",
        [
            "models/test_model_init.py::test_output_projections_do_not_start_at_zero",
            "connections/test_deep_delta.py::test_the_direction_starts_with_a_gradient",
        ],
    ),
    19: (
        "options that are read and ignored",
        [
            "connections/test_contract.py::test_every_choice_of_every_option_is_tried",
            "connections/test_deep_delta.py::test_equals_the_formulas_of_the_paper",
            "models/test_authors_checkpoints.py::test_options_that_do_not_fit_are_refused",
        ],
    ),
    20: (
        "a plain call returns a tuple with the last logits; a mask costs a synchronisation",
        [
            "models/test_outputs.py::test_a_plain_call_returns_the_logits_of_every_position",
            "models/test_model_compile.py::test_evaluation_of_a_padded_batch_compiles",
        ],
    ),
    21: (
        "the v-Map, the other forms of phi_k and the general block do not exist",
        [
            "connections/test_deep_delta.py::test_equals_the_formulas_of_the_paper",
            "connections/test_deep_delta.py::test_delta_residual_equals_its_formula",
        ],
    ),
}


def test_every_defect_is_in_the_table():
    assert list(DEFECTS) == list(range(1, 22))
    assert all(tests for _, tests in DEFECTS.values())


@pytest.mark.parametrize("number", DEFECTS)
def test_the_tests_exist(number):
    for test in DEFECTS[number][1]:
        file, function = test.split("::")
        tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
        assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, test


@pytest.mark.processes
def test_importing_the_models_needs_no_device_package():
    """triton and causal_conv1d are for some machines; the models, and all that they import, do without."""
    code = (
        "import sys\n"
        "for name in ('causal_conv1d', 'fla', 'flash_attn'): sys.modules[name] = None\n"
        "import residua.models\n"
        "assert not any(name.startswith('residua.ops.kernels') for name in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
