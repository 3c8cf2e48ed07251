"""The four geometric benchmarks of arXiv:2605.06729, with the references and checks that their comparison lacks."""
