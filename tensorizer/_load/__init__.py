"""Reading tensors."""
