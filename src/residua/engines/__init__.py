"""Use residua inside other programs: one module for each program, imported only by its users."""
