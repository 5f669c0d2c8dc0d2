"""The weights of any model, from anywhere, for SGLang (docs/sglang.md). Nothing of SGLang is imported here."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Any, Union

import torch

from tensorizer.integrations.engines import load_stream

__all__ = ["load_weights", "weights_iterator"]


def weights_iterator(
    source: Union[str, os.PathLike[str]], device: Union[torch.device, str] = "cpu", **options: Any
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields names and tensors, as ``model.load_weights`` of SGLang takes them.

    Args:
        source: As for :func:`tensorizer.load_stream`, which this calls.
        device: Where the tensors go. By default they go to the CPU, and the model copies its part from there.
        **options: Further keywords of :func:`tensorizer.load_stream`.

    Raises:
        TypeError, OSError, FormatError, HashMismatchError: As :func:`tensorizer.load_stream`.

    Examples:
        >>> from tensorizer.integrations.sglang import weights_iterator
        >>> tensorizer.save_file({"a": torch.ones(2)}, "model.safetensors")
        >>> dict(weights_iterator("model.safetensors"))
        {'a': tensor([1., 1.])}
    """
    return load_stream(source, device=device, **options)


def load_weights(model: Any, named_tensors: Iterable[tuple[str, Any]]) -> None:
    """Loads weights into a model that is being served: the function for ``--custom-weight-loader``.

    SGLang calls it for ``update_weights_from_tensor(..., load_format="tensorizer.integrations.sglang.load_weights")``
    with the pairs of the request. Each name is a source, as for :func:`tensorizer.load_stream`; its tensor is ignored.
    If this raises, some weights may already be in the model: discard the model then.

    Args:
        model: The model, with the method ``load_weights``.
        named_tensors: Pairs of a source and any tensor.

    Raises:
        OSError, FormatError, HashMismatchError: As :func:`tensorizer.load_stream`.

    Examples:
        >>> from tensorizer.integrations.sglang import load_weights
        >>> class Model:
        ...     def load_weights(self, weights):
        ...         print([name for name, _ in weights])
        >>> load_weights(Model(), [("model.tensors", None)])
        ['weight', 'bias']
    """
    for source, _ in named_tensors:
        with load_stream(source) as stream:
            model.load_weights(stream)
            for _ in stream:  # what the model did not ask for: a file is compared at its end
                pass
