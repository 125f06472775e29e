"""Files that `headway export hf --remote-code` puts beside the weights of a model transformers has no class for, one per model_type.

They are read as text, never imported by headway, and import nothing of it: whoever loads the folder may not have headway.
"""
