"""Training of in-context retrieval: the engine's two passes with gradients on."""
