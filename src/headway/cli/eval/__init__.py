"""Measure a model."""
