"""The public functions and types of `import headway as hw`; `headway/__init__.py` lists them.

Nothing here imports torch at the top.
"""
