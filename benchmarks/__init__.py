"""Scripts that measure, for maintainers. A package, so that none of the same name in an environment hides them."""
