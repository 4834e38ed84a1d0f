"""Plain torch over all sequences at once, padded: many short ones, as in training small models."""
