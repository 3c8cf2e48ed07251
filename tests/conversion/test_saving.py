"""Open what was saved."""

import pytest

import residua
from residua.errors import InputError


def test_a_name_that_is_neither_a_folder_nor_valid_on_the_hub_is_refused_at_once():
    with pytest.raises(InputError, match=r"^nowhere must be a folder, or OWNER.NAME"):
        residua.load("nowhere")


def test_a_file_in_place_of_the_folder_is_refused(tmp_path):
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(InputError, match=r"folder must be .*, got '.*model\.safetensors'"):
        residua.load(tmp_path / "model.safetensors")
