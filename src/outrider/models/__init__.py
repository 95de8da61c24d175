"""Target models and MTP drafters, over loaded weights (canonical names: `outrider.models.names`).

Importing `outrider.models.config`, `.builtin_configs`, `.split` or `.inspect` does not import torch.
"""
