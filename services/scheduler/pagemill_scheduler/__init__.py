"""The scheduler: a pure core that owns the block tables, and its thin ZeroMQ shell."""

from pagemill_scheduler import compiled

compiled.prefer(__path__)
