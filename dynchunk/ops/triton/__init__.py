"""Triton kernels as operations: imported when first used, for tensors on a GPU."""
