"""Train tokenizers and look at them."""
