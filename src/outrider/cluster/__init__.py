"""Several engines behind one address, on Ray Serve.

config.py (deployment settings)  prefix.py (choice of a replica)  ingress.py (relay, retries)  replica.py (one engine)
totals.py (metrics): none of these imports Ray. app.py combines them as Serve deployments; batch.py runs batch files on
Ray actors.
"""
