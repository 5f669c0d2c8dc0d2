"""Writing tensors."""
