"""Evaluate trained models.

The modules need different extras, so import each name from its own module, such as `residua.lab.evaluation.loss`.
"""
