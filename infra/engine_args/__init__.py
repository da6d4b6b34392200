"""TensorRT-LLM's engine arguments as data: what keys there are, which combinations work, what memory they need.

Pure: no engine, no files, no clock. ``schema`` is the tree of arguments, ``tree`` reads and merges it, ``rules`` check
one engine or several together, ``memory_estimate`` says what fits on a GPU. Target: 1.2.1.
"""
