"""``vllm serve MODEL --load-format tensorizer_stream``: the weights of any model, from anywhere (docs/vllm.md).

vLLM finds :func:`register` by its entry point (group ``vllm.general_plugins``), and calls it in every process.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import time
import warnings
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Optional

import torch

from tensorizer._system.config import suggestion
from tensorizer._system.redaction import shown_location
from tensorizer._system.sizes import counted, size_text
from tensorizer._version import __version__
from tensorizer.errors import LoadError

# vLLM shows what loggers below its own say.
logger = logging.getLogger("vllm.tensorizer")

_FORMAT = "tensorizer_stream"
_FORMAT_OF_STORES = "runai_streamer"  # one that vLLM takes for models of object stores
_KNOWN_FORMATS = "_LOAD_FORMAT_TO_MODEL_LOADER"
_CHECK = "try_verify_and_update_config"
_CONFIG = "model_loader_extra_config"
_METHODS = {
    "__init__": ("self", "load_config"),
    "download_model": ("self", "model_config"),
    "load_weights": ("self", "model", "model_config"),
}

_registered: list[Any] = []  # the functions of vLLM that were told about our format


def register() -> None:
    """Makes the load format ``tensorizer_stream`` known to vLLM; done once in a process.

    If this release of vLLM has a different interface, this warns, and the other load formats work.

    Examples:
        >>> from tensorizer.integrations.vllm import register
        >>> register()
    """
    try:
        from vllm.model_executor import model_loader
        from vllm.model_executor.model_loader import register_model_loader
        from vllm.model_executor.model_loader.base_loader import BaseModelLoader

        if register_model_loader in _registered or _FORMAT in getattr(model_loader, _KNOWN_FORMATS, ()):
            return
        _check_interface(BaseModelLoader)
        register_model_loader(_FORMAT)(_loader_class(BaseModelLoader))
        _registered.append(register_model_loader)
        _allow_object_storage()
    except Exception as error:
        text = (
            f"tensorizer {__version__} does not know the interface of vLLM {_version_of_vllm()}, so there is no "
            f"--load-format {_FORMAT}: {type(error).__name__}: {error}"
        )
        logger.warning("%s", text)
        with contextlib.suppress(UserWarning):  # where warnings are errors, the other formats still have to work
            warnings.warn(text, stacklevel=2)


def _check_interface(base: type) -> None:
    for name, wanted in _METHODS.items():
        found = tuple(inspect.signature(getattr(base, name)).parameters)
        if found != wanted:
            raise TypeError(
                f"{base.__name__}.{name}: expected the parameters {', '.join(wanted)}, got {', '.join(found)}"
            )


def _allow_object_storage() -> None:
    """Lets models of ``s3://`` have our format.

    vLLM copies their configuration and keeps the place of their weights, but then insists on formats of its own. It
    is shown one of these while it checks. A vLLM that checks otherwise stays as it is.
    """
    try:
        from vllm import config
    except ImportError:
        return
    settings: Any = getattr(config, "VllmConfig", None)
    check = getattr(settings, _CHECK, None)
    if check is None:
        return

    @functools.wraps(check)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        load_config = self.load_config
        if load_config.load_format != _FORMAT:
            return check(self, *args, **kwargs)
        load_config.load_format = _FORMAT_OF_STORES
        try:
            return check(self, *args, **kwargs)
        finally:
            load_config.load_format = _FORMAT

    setattr(settings, _CHECK, checked)


def _version_of_vllm() -> str:
    with contextlib.suppress(Exception):
        import vllm

        return str(vllm.__version__)
    return "of an unknown version"


class _Config(NamedTuple):
    """What ``--model-loader-extra-config`` says.

    Attributes:
        weights: Where the weights are, if not where the model is.
        verify: As for :func:`tensorizer.load_stream`.
        encryption_keyfile: Of the key, 32 bytes: a path or URI.
        public_key: Paths of keys, one of which must have signed the weights.
        cache: The folder of this machine that keeps what is read of a store.
        connections: Requests at a time, for each file.
        progress: Whether the first rank shows a bar.
    """

    weights: Optional[str] = None
    verify: Any = "auto"
    encryption_keyfile: Optional[str] = None
    public_key: Any = None
    cache: Any = None
    connections: Optional[int] = None
    progress: Optional[bool] = None

    @classmethod
    def of(cls, given: Any) -> _Config:
        """Raises ``ValueError`` for what is no mapping, and for unknown keys."""
        if not isinstance(given, Mapping):
            raise ValueError(f"{_CONFIG}: expected a mapping, got {type(given).__name__}")
        for name in given:
            if name not in cls._fields:
                raise ValueError(f"{_CONFIG}: unknown key {name!r}; {suggestion(str(name), cls._fields)}")
        return cls(**given)

    def stream_options(self) -> Optional[dict[str, Any]]:
        """Keywords for opening URIs."""
        options: dict[str, Any] = {}
        if self.cache is not None:
            options["cache"] = self.cache
        if self.connections is not None:
            from tensorizer.stream_io import HTTPOptions

            options["http_options"] = HTTPOptions(connections=self.connections)
        return options or None

    def key(self) -> Any:
        """The key of encrypted weights, if there is one."""
        if self.encryption_keyfile is None:
            return None
        from tensorizer._encryption import DecryptionParams
        from tensorizer.stream_io import open_stream

        with open_stream(self.encryption_keyfile, "rb") as stream:
            return DecryptionParams.from_key(stream.read())


# By model: what it was loaded from at first. vLLM asks a new loader each time.
_first_sources: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()


def _loader_class(base: Any) -> type:
    """The loader, over the class that the installed vLLM has for it."""

    class TensorizerStreamLoader(base):  # type: ignore[misc]
        """Hands the tensors of a model to vLLM while the next ones are read."""

        def __init__(self, load_config: Any) -> None:
            super().__init__(load_config)
            self._config = _Config.of(load_config.model_loader_extra_config or {})

        def download_model(self, model_config: Any) -> None:
            """Brings weights of the hub into its cache; those of other places are read when they are loaded."""
            from tensorizer.integrations.engines import fetch

            fetch(self._source(None, model_config))

        def load_weights(self, model: Any, model_config: Any) -> None:
            """Reads the weights, each time anew."""
            weights = self.get_all_weights(model_config, model)
            loaded = model.load_weights(weights)
            for _ in weights:  # what the model did not ask for: a file is compared at its end
                pass
            if loaded is not None and model_config.quantization is None:
                _check_all_loaded(model, loaded, self._source(model, model_config))

        def get_all_weights(self, model_config: Any, model: Any) -> Iterator[tuple[str, torch.Tensor]]:
            """Names and tensors; also what vLLM calls to load a model that runs anew."""
            yield from self._streamed(self._source(model, model_config), model)
            for other in getattr(model, "secondary_weights", ()):
                source = _with_revision(other.model_or_path, other.revision)
                for name, tensor in self._streamed(source, model):
                    yield other.prefix + name, tensor

        def _source(self, model: Any, model_config: Any) -> str:
            named = getattr(model_config, "model_weights", None) or model_config.model
            moved = model is not None and _first_sources.setdefault(model, named) != named
            if self._config.weights is not None and not moved:  # a reload may name another place
                return self._config.weights
            return _with_revision(named, getattr(model_config, "revision", None))

        def _streamed(self, source: str, model: Any) -> Iterator[tuple[str, torch.Tensor]]:
            from tensorizer.integrations.engines import load_stream

            config, begin = self._config, time.perf_counter()
            shows = self.load_config.use_tqdm_on_load if config.progress is None else config.progress
            with load_stream(
                source,
                device=_device_of(model),
                verify=config.verify,
                encryption=config.key(),
                public_key=config.public_key,
                stream_options=config.stream_options(),
                progress=bool(shows) and _is_first_rank(),
            ) as stream:
                checked = stream.file.verified_by
                how = "not verified" if checked is None else f"verified by {checked}"
                if checked is None:
                    logger.info("%s: %s: nothing states what the bytes have to be", stream.file.source_name, how)
                yield from stream
                seconds = time.perf_counter() - begin
                rate = size_text(stream.nbytes / seconds) if seconds > 0 else "?"
                logger.info(
                    "loaded %s in %.2f s (%s/s) from %s, %s",
                    size_text(stream.nbytes),
                    seconds,
                    rate,
                    stream.file.source_name,
                    how,
                )

    return TensorizerStreamLoader


def _with_revision(source: str, revision: Optional[str]) -> str:
    """A repository of the hub at its revision; other places as they are."""
    from tensorizer.integrations.engines import is_hub_id

    return f"hf://{source}@{revision.replace('/', '%2F')}" if revision and is_hub_id(source) else source


def _device_of(model: Any) -> torch.device:
    """Where the model is; that of this rank for one whose parameters have no memory yet."""
    for parameter in model.parameters():
        if not parameter.is_meta:
            return torch.device(parameter.device)
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _is_first_rank() -> bool:
    import torch.distributed as dist

    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0


def _check_all_loaded(model: Any, loaded: Any, source: str) -> None:
    """Refuses a model some of whose parameters nothing was loaded for, as vLLM's own loader does.

    Those of layers that make their parameters themselves afterwards are spared.
    """
    missing = {name for name, _ in model.named_parameters()} - set(loaded)
    for path, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if getattr(method, "uses_meta_device", False) or hasattr(method, "process_weights_after_loading"):
            missing -= {f"{path}.{name}" if path else name for name, _ in module.named_parameters()}
    if missing:
        listed = ", ".join(sorted(missing)[:5])
        raise LoadError(
            f"{shown_location(source)}: {counted(len(missing), 'parameter')} of {type(model).__name__} got no tensor: "
            f"{listed}"
        )
