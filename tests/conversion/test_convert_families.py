"""Every model of transformers is converted without a changed bit, or refused with a reason."""

import pytest
import transformers

from residua.lab.opening import quiet
from support.families import FAMILIES
from support.family_table import PAGE, row, rows, sample, version

OTHERS = sorted(rows().keys() - set(FAMILIES))
SAMPLE = sample()


@pytest.fixture(autouse=True)
def silent():
    with quiet():
        yield


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "family",
    [pytest.param(family, marks=() if family in SAMPLE else pytest.mark.nightly) for family in [*FAMILIES, *OTHERS]],
)
def test_a_family_is_converted_or_refused_as_the_page_says(family):
    found = row(family)
    if transformers.__version__ != version():
        pytest.skip(f"the page is about transformers {version()}; here is {transformers.__version__}")
    assert found == rows()[family]


def test_the_page_has_at_least_sixty_language_models_and_as_many_others_that_convert():
    for section in PAGE.read_text(encoding="utf-8").split("\n## ")[1:]:
        assert section.count("| bit-equal |") >= 60, section.partition("\n")[0]
