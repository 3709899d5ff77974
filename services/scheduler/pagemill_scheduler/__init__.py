"""The scheduler: a pure core that owns the block tables, and its thin ZeroMQ shell."""
