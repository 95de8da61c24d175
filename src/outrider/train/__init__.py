"""Training drafters: `run` is the whole command, `answers` lets the target answer, `trainer` trains, `evaluate`
measures, `export` writes.

Nothing here is needed to serve a model.
"""
