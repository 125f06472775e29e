"""The flat engine (DDP, ZeRO-1, ZeRO-1.5).

Parameters and gradients of a group lie in one flat buffer, split into buckets.
"""
