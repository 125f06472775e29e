"""Token files of other systems: InternLM, zero2all, MDS and Megatron, read in place and written so
that those systems read them."""
