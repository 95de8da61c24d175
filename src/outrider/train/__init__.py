"""Training drafters (`run` is the whole command). Serving a model needs none of this."""
