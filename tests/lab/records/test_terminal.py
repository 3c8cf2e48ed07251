"""Untrusted text cannot control a terminal."""

import json

from residua.lab.records.terminal import printable

FOREIGN = "a\x1b]0;title\x07\x1b[2J\x9b31m\r\x7fb\x00"
SHOWN = r"a\u001b]0;title\u0007\u001b[2J\u009b31m\u000d\u007fb\u0000"


def test_control_characters_are_escaped_and_letters_are_unchanged():
    assert printable(FOREIGN) == SHOWN
    assert printable("Größe 日本 😀 \u200d\xa0\t1\n") == "Größe 日本 😀 \u200d\xa0\t1\n"
    assert printable(None) == "None"
    assert printable("caf\udce9").encode() == b"caf\\udce9"


def test_json_output_remains_valid():
    value = {FOREIGN: [FOREIGN]}
    assert json.loads(printable(json.dumps(value, ensure_ascii=False))) == value
