"""Several engines behind one address, on Ray Serve. Only app.py, batch.py, router.py and run.py import Ray."""
