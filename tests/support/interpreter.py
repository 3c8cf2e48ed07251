"""Triton's interpreter, which prepares its language anew for every function that a kernel calls."""

import os
from types import SimpleNamespace

import pytest


@pytest.fixture(autouse=True)
def prepared_once(monkeypatch):
    """Once for a launch is enough, and takes two fifths of the time away."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    import triton.language as tl
    from triton.runtime import interpreter

    prepare, everything = interpreter._patch_lang, SimpleNamespace(__globals__={"tl": tl, "core": tl.core})

    def once(function):
        return prepare(everything) if tl.core.is_builtin(tl.load) else None

    monkeypatch.setattr(interpreter, "_patch_lang", once)
