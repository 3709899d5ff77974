"""Parts of peers.py: the servers that are compared, the client that loads them, and the report."""
