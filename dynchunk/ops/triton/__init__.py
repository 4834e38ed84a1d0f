"""Triton kernels as operations. Importing a module of this package imports Triton."""
