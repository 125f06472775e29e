"""Which heads see everything: masks of trained gates."""
