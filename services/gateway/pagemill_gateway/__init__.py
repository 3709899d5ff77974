"""The gateway: HTTP in, text and server-sent events out."""
