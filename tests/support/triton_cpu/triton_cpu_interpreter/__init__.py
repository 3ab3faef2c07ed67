"""A backend of Triton for CPU that compiles nothing: kernels run in Triton's interpreter.

vLLM's Model Runner V2 needs a Triton with a backend for CPU, and none is on the package index. With
this folder on PYTHONPATH and `TRITON_INTERPRET=1` the runner's kernels run as Python, slowly.
"""
