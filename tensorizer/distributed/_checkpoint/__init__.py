"""Stores checkpoints of ``torch.distributed.checkpoint`` in ``.tensors`` files; docs/training.md shows the use."""
