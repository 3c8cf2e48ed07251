"""Evaluate trained models.

The modules need different extras, so each name is imported from its own, such as `residua.lab.evaluation.loss`.
"""
