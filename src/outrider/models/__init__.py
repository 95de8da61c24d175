"""Target models and MTP drafters, over loaded weights (canonical names: `outrider.weights.names`).

Importing `outrider.models.config`, `.builtin_configs`, `.compat`, `.split` or `.inspect` does not import torch.
"""
