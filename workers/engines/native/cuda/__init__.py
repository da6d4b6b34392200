"""The native engine on CUDA: Triton kernels, modelling code rewritten by rule, graphs per batch size, steps ahead.

Imported only where a CUDA device is used; Triton comes with torch's CUDA builds.
"""
