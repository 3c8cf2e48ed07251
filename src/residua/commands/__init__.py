"""The commands. `signature` turns the signature and docstring of a function into options and help.

Functions import slow modules themselves, so that `--help` is fast.
"""
