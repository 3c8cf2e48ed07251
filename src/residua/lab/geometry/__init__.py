"""The four geometric benchmarks of arXiv 2605.06729, with references and checks that the publication lacks."""
