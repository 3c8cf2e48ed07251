"""One page, self-contained and opened from disk, on which connections can be played with, inspected and compared."""

from residua.explorer.page import write_page

__all__ = ["write_page"]
