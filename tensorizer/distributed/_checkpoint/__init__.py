"""Checkpoints of ``torch.distributed.checkpoint`` in ``.tensors`` files; docs/distributed_checkpoints.md says how."""
