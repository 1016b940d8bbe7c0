"""The CPU backend: the forward pass recorded once as a program of kernels, run natively by a thread team."""
