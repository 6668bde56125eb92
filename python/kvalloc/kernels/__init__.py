"""What runs on the tensors: attention over pages, writing and copying them; and its plain reference.

`decode`, `write`, `copy` and `quantise` hold the Triton kernels, each with the Python function that checks
its arguments and launches it; `values` how fp8 and int8 are read and written; `device` what a launch asks of
the card. Import what you use: nothing here imports torch or triton before that. ``docs/kernels.md`` tells
what each kernel does and how far it was tested.
"""
