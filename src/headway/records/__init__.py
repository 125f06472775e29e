"""Kinds of raw records.

`KINDS` names the modules that `data.train.N.kind` of a recipe may choose, besides `auto`.
"""

KINDS = ("text", "chat", "preference", "unpaired", "multimodal", "captions", "prompt", "retrieval")
