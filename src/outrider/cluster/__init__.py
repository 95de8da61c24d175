"""Several engines behind one address, on Ray Serve.

config.py (what is deployed)  prefix.py (who gets a request)  ingress.py (relay, retries)  replica.py (one engine)
totals.py (metrics): none of these imports Ray. app.py puts them together as Serve deployments; batch.py runs batch
files on Ray actors.
"""
