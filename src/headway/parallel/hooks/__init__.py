"""How a bucket of gradients is exchanged.

`KINDS` names the modules that `parallel.hook.kind` may choose.
"""

KINDS = ("all_reduce", "compress", "powersgd", "reduce_scatter", "torch_style")
