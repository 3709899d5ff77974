"""The architectures that the worker runs.

One file per family; `registry` maps the architecture's name in a model's config.json to it.
"""
