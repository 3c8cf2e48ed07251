"""Open what was saved."""

import pytest

import residua
from residua.errors import InputError


def test_a_name_that_is_neither_a_folder_nor_valid_on_the_hub_is_refused_at_once():
    with pytest.raises(InputError, match="nowhere: no such folder"):
        residua.load("nowhere")
