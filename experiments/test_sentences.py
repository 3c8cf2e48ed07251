"""Each number of sentences.md is one that sentences.py computes, and the other way round."""

import re

from support.pages import EXPERIMENTS, TOOLS, script


def test_each_number_has_a_sentence():
    templates = script("blocks", TOOLS).templates(EXPERIMENTS / "sentences.md")
    names = {name for text in templates.values() for name in re.findall(r"\{(\w+)\}", text)}
    assert names == script("sentences").numbers().keys()
