"""The storages of ``torch.distributed.checkpoint``: its own files by one thread and by several, and safetensors."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from benchmarks.contender import Contender


class TorchDcp(Contender):
    name = "torch-dcp"
    label = "FileSystemWriter/Reader"

    def import_library(self) -> None:
        import torch.distributed.checkpoint  # noqa: F401

    def version(self) -> str:
        import torch

        return str(torch.__version__)

    def dcp_writer(self, path: Path) -> Any:
        from torch.distributed.checkpoint import FileSystemWriter

        return FileSystemWriter(path)

    def dcp_reader(self, path: Path) -> Any:
        from torch.distributed.checkpoint import FileSystemReader

        return FileSystemReader(path)


class TorchDcpThreads(TorchDcp):
    """A thread per processor for each rank; the reader has none to give."""

    name = "torch-dcp-threads"
    label = "FileSystemWriter, all cores"

    def dcp_writer(self, path: Path) -> Any:
        from torch.distributed.checkpoint import FileSystemWriter

        return FileSystemWriter(path, thread_count=max(2, os.cpu_count() or 2))


class HuggingFaceDcp(TorchDcp):
    name = "hf-dcp"
    label = "HuggingFaceStorageWriter/Reader"

    def dcp_writer(self, path: Path) -> Any:
        from torch.distributed.checkpoint import HuggingFaceStorageWriter

        path.mkdir(parents=True, exist_ok=True)
        return HuggingFaceStorageWriter(str(path), save_distributed=True)

    def dcp_reader(self, path: Path) -> Any:
        from torch.distributed.checkpoint import HuggingFaceStorageReader

        return HuggingFaceStorageReader(str(path))

    def dcp_model_reader(self, path: Path) -> Any:
        return self.dcp_reader(path)
