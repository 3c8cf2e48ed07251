"""Durable writing, and reading that is bounded: the files of the library itself."""
