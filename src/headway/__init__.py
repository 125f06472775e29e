"""headway: one LLM training system, from raw text to a served long-context model."""

__version__ = "0.1.0"
