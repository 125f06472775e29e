"""An OpenAI-compatible server: HTTP requests come in, text goes out.

The HTTP process has no torch; each model is a process of its own.
"""
