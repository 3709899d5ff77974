"""Attention and cache kernels: tensors in, tensors out. Nothing here knows a sequence, a request or a message.

``interface`` says what a set of kernels does, ``reference`` does it in plain torch and is the specification,
``select`` chooses the set for a device.
"""
