"""Pipeline parallelism: the stages of a rank, the order of its work, and its messages."""
