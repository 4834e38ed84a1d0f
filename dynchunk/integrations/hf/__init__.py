"""Models of the transformers library: batches, caches and attention that follow a policy."""
