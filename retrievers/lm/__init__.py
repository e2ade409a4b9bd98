"""A decoder language model that holds the corpus in its KV cache: what `blocksearch` and `attention` share."""
