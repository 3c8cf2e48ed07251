"""One file for each paper. None imports another."""
