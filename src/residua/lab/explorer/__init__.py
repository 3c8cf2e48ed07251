"""A self-contained web page, opened from disk, to try, inspect and compare connections."""

from residua.lab.explorer.page import write_page

__all__ = ["write_page"]
