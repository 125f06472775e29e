"""New instruction data from a few seed tasks and any model behind an OpenAI-compatible endpoint,
filtered and ready for fine-tuning.
"""
