import pytest

from residua.lab.data import prepare


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """A folder of forty prepared texts, with a vocabulary of 300."""
    folder = tmp_path_factory.mktemp("text")
    for i in range(40):
        text = " ".join(f"word{(i * j) % 97} is {(i + j) % 13}," for j in range(60))
        (folder / f"{i:02d}.txt").write_text(text)
    return prepare(str(folder), folder / "data", vocab_size=300, progress=False).folder
