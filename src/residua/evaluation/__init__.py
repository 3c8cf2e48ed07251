"""Evaluate trained models: `loss` on held-out text, `generate` text, `compare` runs, `plots` of a comparison.

The modules need different extras, so each name is imported from its own: `from residua.evaluation.loss import
held_out_loss`, `from residua.evaluation.generate import complete`, `from residua.evaluation.compare import compare`.
"""
