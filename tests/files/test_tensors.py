import pytest
import torch

from residua.errors import InputError
from residua.files.tensors import read_tensors, undamaged, write_tensors


def test_tensors_metadata_and_views_of_one_storage_are_restored_from_a_file(tmp_path):
    path, values = tmp_path / "a.safetensors", torch.arange(6.0).view(2, 3).requires_grad_()
    write_tensors(path, {"whole": values, "columns": values.T}, {"name": "value"})
    tensors, metadata = read_tensors(path, "a", "make it again")
    assert torch.equal(tensors["whole"], values)
    assert torch.equal(tensors["columns"], values.T)
    assert metadata == {"name": "value"}
    assert [file.name for file in tmp_path.iterdir()] == ["a.safetensors"]


HEADER = b'{"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}'


@pytest.mark.parametrize(
    "content",
    [None, b"", b"no tensors", len(HEADER).to_bytes(8, "little") + HEADER],
    ids=["missing", "empty", "text", "truncated"],
)
def test_a_damaged_file_gives_a_one_line_error(content, tmp_path):
    path = tmp_path / "a.safetensors"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError) as error:
        read_tensors(path, "a thing", "make it again")
    line = str(error.value)
    assert line.startswith(f"{path} must be a thing, got a damaged file (")
    assert line.endswith("); make it again")
    assert "\n" not in line


def test_an_input_error_inside_is_raised_unchanged():
    with pytest.raises(InputError, match=r"^clear$"), undamaged("file", "a thing"):
        raise InputError("clear")
