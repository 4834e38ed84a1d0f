"""Models of other libraries: their policies, weights and caches."""
