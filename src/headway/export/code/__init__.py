"""Files that `headway export hf --remote-code` puts next to the weights of a model without a
transformers class, one per model_type.

They are read as text, never imported by headway, and do not import headway: a user of the folder
may not have it installed.
"""
