"""The models that the worker runs; `registry` loads one by the architecture's name in its config.json.

`decoder` is one decoder with all its variants: `description` names them, `architectures` has one entry per family.
"""
