"""Pipeline parallelism: which stages a rank has, what it does in which order, and how hidden states travel between ranks."""
