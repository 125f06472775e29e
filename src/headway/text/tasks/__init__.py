"""Cleaning, deduplication and sampling as tasks for many machines (`runtime/executor/`): the
same bytes as in one process.
"""
