"""Training drafters: `run` is the whole command, `answers` generates the target's answers, `trainer` trains, `evaluate`
measures, `export` writes.

Serving a model needs none of this.
"""
