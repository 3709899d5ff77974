"""Kernels for CPUs, in C++: ``source`` holds them, ``build`` compiles, ``cached`` keeps what was compiled on first use,
``library`` loads, ``kernels`` puts them behind the interface.

``build`` and ``cached`` need no torch, so that an image can compile in a stage of its own.
"""
