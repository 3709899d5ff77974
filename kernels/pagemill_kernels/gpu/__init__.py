"""The Triton set of kernels, for NVIDIA GPUs.

``work`` cuts an iteration into work items on the host, ``tiles`` says how large the pieces of a kernel are,
``attention``, ``write`` and ``blocks`` hold the kernels, ``kernels`` joins them to a `Kernels`.
Only ``kernels`` is imported from outside, and only where there is a GPU: importing it imports triton.
"""
