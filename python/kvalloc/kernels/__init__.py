"""Attention, writes and copies over pages. `reference` is the truth that the others are tested against.

`decode`, `write`, `copy` and `quantise` are the Triton kernels, each with the Python function that checks its
arguments and launches it; `values` says how fp8 and int8 are read and written, `device` what a launch asks of
the card. `cuda` does the same jobs for cupy, `torch_cpu` on the CPU; `latent` is what MLA does around any of
them. Import what you use: nothing here imports torch, triton or cupy before that. ``docs/kernels.md`` tells
what was tested how.
"""
