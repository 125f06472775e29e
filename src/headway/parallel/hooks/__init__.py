"""How gradients are exchanged: one file per kind. A hook takes a bucket, starts the exchange and returns a handle with `wait`."""
