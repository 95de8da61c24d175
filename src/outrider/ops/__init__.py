"""Choose the ops once: `choose(device, name)` returns the object that every model is handed."""
