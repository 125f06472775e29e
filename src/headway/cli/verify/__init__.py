"""Prove it: that a run resumes exactly, that a checkpoint is whole."""
