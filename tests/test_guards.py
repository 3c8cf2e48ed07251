"""What a change of structure must keep: numbers, as guards.json has them.

`python tools/guards.py --write` writes guards.json.
`python tools/guards.py BASE` compares far more, to the last bit, with another commit.
"""

import json

import pytest
import torch

from support.pages import TOOLS, script

RELATIVE = 1e-6  # float64 all through: processors differ in the last digits, and a changed formula in the first


@pytest.fixture(scope="module")
def guards():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(TOOLS)  # for a process that is spawned, which imports it too
        yield script("guards", TOOLS)


@pytest.fixture(scope="module")
def record(guards):
    return json.loads(guards.RECORD.read_text(encoding="utf-8"))


@pytest.mark.slow
@pytest.mark.parametrize("part", ["models", "generation", "converted"])
def test_the_numbers_equal_the_recorded_ones(guards, record, part):
    numbers = guards.numbers(part)
    assert numbers.keys() == record[part].keys()
    for name, values in numbers.items():
        assert values.keys() == record[part][name].keys()
        for key, value in values.items():
            recorded = record[part][name][key]
            assert value == (recorded if key == "tokens" else pytest.approx(recorded, rel=RELATIVE)), (name, key)


@pytest.mark.nightly
@pytest.mark.processes
def test_copies_compute_the_same(guards):
    """By deepcopy, by pickle, from a saved folder, and in a process that is spawned."""
    expected = guards.logits(guards.tiny("ddl-tc", torch.float32))
    results = dict(guards.copies(("ddl-tc",)))
    assert [name.split()[1] for name in results] == ["deepcopy", "pickle", "saved", "spawned"]
    for name, tensors in results.items():
        assert torch.equal(tensors["logits"], expected), name


def test_a_difference_is_named(guards):
    assert guards.differences({"a": "1", "b": "2", "c": "3"}, {"a": "1", "b": "4", "d": "5"}) == [
        "gone     c",
        "changed  b",
    ]


def test_a_change_of_one_bit_a_name_or_a_dtype_changes_the_digest(guards):
    weight = torch.ones(3)
    tensors = [{"w": weight}, {"w": weight.nextafter(torch.tensor(2.0))}, {"v": weight}, {"w": weight.bfloat16()}]
    assert len({guards.digest(each) for each in tensors}) == 4
    assert guards.digest({"w": weight.clone()}) == guards.digest({"w": weight})
