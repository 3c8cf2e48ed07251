"""Base classes and modules that several schemes share."""
