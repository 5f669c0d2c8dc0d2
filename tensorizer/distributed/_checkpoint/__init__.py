"""Checkpoints of ``torch.distributed.checkpoint`` in ``.tensors`` files; docs/training.md says how."""
