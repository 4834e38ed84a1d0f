"""Triton kernels of dynchunk. They need torch and triton, and know nothing of dynchunk.

Importing this package imports neither; import the module of the kernel you call.
"""
