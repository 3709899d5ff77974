"""Paged-attention and cache kernels: tensors in, tensors out."""
