"""Triton kernels of the training step. Nothing here is imported on a machine without a CUDA GPU.

Kernels take row buffers of which the last dimension is contiguous, and accumulate in float32. Row counts, and pointers
into tables that a step slices anywhere, are not specialised on, or each new mask would compile anew; pointers to whole
rows are, since their alignment never changes and wide loads need it. `TRITON_INTERPRET=1` runs them
on a CPU (float32; its bf16 dot is wrong), which is how the tests compare them with `drafter.plain`.
"""
