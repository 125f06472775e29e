"""Long-context tasks: one file per task; `write(rng, units, depth)` makes a prompt that grows with `units`."""
