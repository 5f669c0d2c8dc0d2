"""Models, pipelines and adapters of the Hugging Face libraries, to and from folders, buckets and the hub.

:func:`save_pretrained` and :func:`from_pretrained` are one line each way. No library is imported before it is needed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional, Union

import torch

from tensorizer._io.call_options import CallOptions, Trust
from tensorizer._load.digests import AUTO, verification
from tensorizer._progress import ProgressArgument, terminal_bar
from tensorizer._signing import PublicKeyArgument
from tensorizer._system.devices import as_device, one_device
from tensorizer.errors import UnsupportedContentError

if TYPE_CHECKING:
    from tensorizer.integrations._hf.folders import LoadOptions, ModelFolder

__all__ = ["from_pretrained", "load_adapter", "save_pretrained"]

# Added to messages if a store cannot be listed and has no list of files.
_OF_PROCESSORS = (
    *("tokenizer_config.json", "tokenizer.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja"),
    *("chat_template.json", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.json", "vocab.txt"),
    *("merges.txt", "processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json"),
    *("config.json", "generation_config.json"),
)

Folder = Union[str, os.PathLike[str]]
StreamOptions = Optional[Mapping[str, Any]]


def _shown(progress: ProgressArgument) -> ProgressArgument:
    """What the argument means here: ``None`` is a bar on a terminal."""
    if progress is not None:
        return progress
    return sys.stderr.isatty() and terminal_bar()


def save_pretrained(
    obj: Any,
    folder: Folder,
    *,
    tokenizer: Any = None,
    metadata: Optional[Mapping[str, str]] = None,
    format: str = "tensors",
    ties: str = "once",
    encryption: Any = None,
    max_shard_size: Union[str, int, None] = None,
    variant: Optional[str] = None,
    names: str = "model",
    progress: ProgressArgument = None,
    stream_options: StreamOptions = None,
) -> None:
    """Write an object as its library's ``save_pretrained`` would, with the weights in ``.tensors`` files.

    A ``SentenceTransformer`` needs ``format="safetensors"``: only its library loads it, and reads no other files.

    It writes the configuration, the generation configuration and the tokenizer beside them, so that ``AutoConfig`` and
    ``AutoTokenizer`` open the folder; :func:`from_pretrained` opens all of it. A local file appears when it is
    complete, the weights first. Shards and the single file of an earlier save under the same name are removed. In a
    bucket, only the file that readers would try is removed; shards that no index names stay. Files of the model in the
    other format stay too, with a warning: readers of the folder then raise until one of the two is removed.

    Args:
        obj: A model of ``transformers`` or ``diffusers``, a ``PeftModel`` (only its adapters), a pipeline, or a
            ``SentenceTransformer``.
        folder: A local folder, created if missing, or an ``s3://`` prefix.
        tokenizer: A tokenizer, a processor, or another object with ``save_pretrained(folder)`` that the model needs.
        metadata: Texts to store in the files of weights, beside those that name the writer.
        format: Format of the weights: ``"tensors"``, or ``"safetensors"``, which the libraries read too.
        ties: ``"once"`` stores a tensor with several names once and records the other names; ``"twice"`` stores it
            under each name.
        encryption: Encrypts the weights (:class:`tensorizer.EncryptionParams`); configurations stay in clear.
        max_shard_size: Bytes, or a text like ``"5GB"``: writes several files and an index. Default: one file.
        variant: A word in the names of the files of weights, as in ``model.fp16.tensors``.
        names: ``"model"``, the default, stores tensors under the names of ``state_dict()``. If the library that loads
            them has the same names, they go straight to the device. ``"library"`` stores the names of transformers' own
            files, for its other releases and for engines such as vLLM: version 5 keeps experts fused, and names parts
            of some models differently from version 4. The library then writes a temporary file first, and ``metadata``
            is not stored.
        progress: ``True`` shows a bar, ``False`` none; a callable is told about bytes done. By default a bar appears on
            a terminal after one second.
        stream_options: Keywords for :func:`tensorizer.stream_io.open_stream`, such as ``s3_endpoint``.

    Raises:
        TypeError: `obj` is not one of these.
        ValueError: Tensors have no data (meta device, offloaded), `names` or `format` is an unknown word, or
            `encryption` was passed for ``.safetensors`` files.
        UnsupportedContentError: ``torchao`` quantised the model, so its layout is not in its tensors; or `format` of a
            ``SentenceTransformer`` is not ``"safetensors"``.
        OSError: The folder cannot be written.

    Examples:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from tensorizer.integrations.huggingface import from_pretrained, save_pretrained
        >>> config = LlamaConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
        >>> save_pretrained(LlamaForCausalLM(config), "llama")
    """
    from tensorizer.integrations._hf.saving import save_folder

    save_folder(
        obj,
        folder,
        tokenizer=tokenizer,
        metadata=metadata,
        format=format,
        ties=ties,
        encryption=encryption,
        max_shard_size=max_shard_size,
        variant=variant,
        names=names,
        progress=_shown(progress),
        stream_options=stream_options,
    )


def from_pretrained(
    source: Folder,
    model_class: Any = None,
    *,
    revision: Optional[str] = None,
    subfolder: str = "",
    variant: Optional[str] = None,
    dtype: Union[torch.dtype, str, None] = "auto",
    device: Union[torch.device, str, None] = None,
    device_map: Any = None,
    quantization_config: Any = None,
    config: Any = None,
    strict: bool = True,
    verify: Any = "auto",
    encryption: Any = None,
    public_key: PublicKeyArgument = None,
    require_authenticated: Optional[bool] = None,
    cache: bool = True,
    local_files_only: bool = False,
    token: Any = None,
    allow_pickle: bool = False,
    mmap: Optional[bool] = None,
    output_loading_info: bool = False,
    progress: ProgressArgument = None,
    stream_options: StreamOptions = None,
    **model_kwargs: Any,
) -> Any:
    """Load a model, pipeline or adapter from ``.tensors``, ``.safetensors`` or ``.bin`` weights.

    The result is that of the library's own ``from_pretrained``: in evaluation mode, tied, with its generation
    configuration. If names and shapes of the file are those of the model, tensors go straight to the device. If the
    library has to rename, convert or quantise, it gets a state dict (docs/huggingface.md lists the cases).

    Args:
        source: A local folder, an ``s3://`` or ``https://`` prefix, ``hf://org/name[@revision]``, or a hub id.
        model_class: The class of the model, or an ``AutoModel...``. ``None`` is the class that the configuration names.
            Code of a repository is never executed: import its class and pass it here. A class of ``transformers``
            without weights (tokenizer, processor, configuration) gets the small files of the folder, and
            `model_kwargs`.
        revision: Branch, tag or commit of a hub repository; resolved once, all files are of that commit.
        subfolder: Folder inside of `source`.
        variant: A word in the names of the files of weights.
        dtype: A dtype or its name; ``"auto"`` is that of the configuration, else of the weights; ``None`` is torch's
            default dtype. Parts that the class keeps in ``float32`` stay so. For a pipeline also a mapping from names
            of components, and ``"default"``, to dtypes. ``torch_dtype`` is its old name, deprecated where the library
            says so.
        device: Where the model goes; the CPU by default, as with the libraries.
        device_map: As the library takes it; needs ``accelerate``.
        quantization_config: Quantises while loading, by the library.
        config: A configuration instead of the one of the folder.
        strict: Raises if tensors are missing or unexpected. ``False`` leaves that to the library, which initialises
            missing ones: from a base model to one with a head and back.
        verify: The digests that the weights are compared with, as for :func:`tensorizer.load_stream`. ``"auto"``, the
            default: those in ``.tensors`` files. ``"hub"``: those that the hub states. A path or URI: those in a
            ``SHA256SUMS`` file or an OpenSSF signature. ``True``: those in the files; ``.safetensors`` files have none,
            so they raise. ``False``: none.
        encryption: The key of encrypted weights (:class:`tensorizer.DecryptionParams`).
        public_key: Keys, one of which must have signed the weights, as for :class:`tensorizer.TensorDeserializer`.
            Signatures do not cover configurations.
        require_authenticated: Whether the key or a signature must authenticate the weights (docs/api/index.md).
        cache: ``False`` reads a hub repository over HTTPS instead of through the cache.
        local_files_only: Sends no request to the hub; ``HF_HUB_OFFLINE`` does the same. If the hub cannot be reached,
            the files in the cache are used, with a warning.
        token: For the hub, as ``huggingface_hub`` takes it; it is sent only to the hub's host.
        allow_pickle: If there are only ``.bin`` files, reads them with ``torch.load(weights_only=True)``.
        mmap: ``True`` makes the tensors copy-on-write views of local, unencrypted weights. The call returns at once,
            and the system reads a page when it is first used. A program that writes into the file changes the model,
            and a program that truncates it ends the process; replacing the file changes nothing. ``None`` maps on the
            CPU, as the libraries do, if no tensor is converted or compared and the file is not on a network file
            system. ``False`` reads the file.
        output_loading_info: Returns ``(model, info)``, with the information of the library.
        progress: ``True`` shows a bar, ``False`` none; a callable is told about bytes done. By default a bar appears on
            a terminal after one second.
        stream_options: Keywords for :func:`tensorizer.stream_io.open_stream`, such as ``s3_endpoint``.
        **model_kwargs: Other arguments of the library's ``from_pretrained``; members of the configuration override it.

    Raises:
        TypeError: The class or ``None`` comes before the source; the message shows the order.
        FileNotFoundError: The folder, bucket, repository or revision does not exist, or has no weights.
        RuntimeError: `device` or `device_map` names CUDA, and CUDA is not available. Nothing was read then.
        FormatError: The folder has several sets of weights, and no note says that one was made from the other.
        LoadError: With `strict`, tensors are missing or unexpected.
        ValueError: No class is named or known, or its code is in the repository; ``trust_remote_code=True``; no dtype
            of floating point, or the misspelt name of one; weights
            that only `allow_pickle` would load; `mmap` with another device than the CPU or a
            device map, or of what is encrypted, pickled or not local; ``output_loading_info`` of something that has
            none.
        UnsupportedContentError: A model quantised by ``torchao``, unless the library can read a local folder itself.
        VerificationError, CryptographyError, FormatError, OSError: The files, as for
            :class:`tensorizer.TensorDeserializer`.

    Examples:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from tensorizer.integrations.huggingface import from_pretrained, save_pretrained
        >>> config = LlamaConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
        >>> save_pretrained(LlamaForCausalLM(config), "llama")
        >>> type(from_pretrained("llama", progress=False)).__name__
        'LlamaForCausalLM'
    """
    progress = _shown(progress)
    got = None
    if source is None or isinstance(source, type):
        got = f"{getattr(source, '__name__', source)} as the source"
    elif isinstance(model_class, (str, os.PathLike)):
        got = f"a {type(model_class).__name__} as the class"
    if got is not None:
        raise TypeError(
            f"expected the source first and the class second, from_pretrained(source, model_class), got {got}"
        )
    if model_kwargs.pop("trust_remote_code", False):
        raise ValueError(
            "trust_remote_code: code of a repository is never run; import the class and pass it as model_class="
        )
    from tensorizer.integrations._hf.folders import LoadOptions
    from tensorizer.integrations._hf.models import asked_dtype, check_device_map

    torch_dtype = model_kwargs.pop("torch_dtype", None)
    old_name_of_dtype = torch_dtype is not None
    dtype = asked_dtype(torch_dtype if old_name_of_dtype and dtype == "auto" else dtype)
    device = as_device(device)
    if mmap and (device_map is not None or device.type != "cpu"):
        raise ValueError("mmap: views of a file are on the CPU: leave out device= and device_map=")
    one_device(device)
    check_device_map(device_map)
    call = CallOptions.to_read(encryption, stream_options, None, progress, Trust.of(public_key, require_authenticated))
    options = LoadOptions(
        revision=revision,
        subfolder=subfolder,
        cache=cache,
        local_files_only=local_files_only,
        token=token,
        call=call,
        variant=variant,
        dtype=dtype,
        old_name_of_dtype=old_name_of_dtype,
        device=device,
        device_map=device_map,
        quantization_config=quantization_config,
        config=config,
        strict=strict,
        verify=AUTO if verify == "auto" else verification(verify, call),
        allow_pickle=allow_pickle,
        mmap=mmap,
        model_kwargs=model_kwargs,
    )
    model, info = _load(source, model_class, options)
    if not output_loading_info:
        return model
    if info is None:
        raise ValueError(f"output_loading_info: only models of transformers have it, got {type(model).__name__}")
    return model, info


def _load(source: Any, cls: Any, options: LoadOptions) -> tuple[Any, Optional[dict[str, Any]]]:
    """Loads the object in a folder, and returns it with the loading information of ``transformers`` models.

    Raises:
        FileNotFoundError: The folder has none of the files that tell which kind of object it holds.
    """
    from tensorizer.integrations._hf.folders import open_folder

    with open_folder(source, options) as opened:
        return _load_object(cls, opened.below(options.subfolder), options)


def _load_object(cls: Any, folder: ModelFolder, options: LoadOptions) -> tuple[Any, Optional[dict[str, Any]]]:
    from tensorizer.integrations._hf import models, objects

    if _is_without_weights(cls):
        return cls.from_pretrained(_small_files(folder), **options.model_kwargs), None
    if folder.has(objects.PIPELINE):
        return objects.load_pipeline(cls, folder, options), None
    if models.is_of("sentence_transformers", cls) or (cls is None and folder.has("modules.json")):
        raise UnsupportedContentError(
            f"{folder.label}: a sentence transformer, which its library reads from .safetensors files: "
            "SentenceTransformer(folder) loads the folder"
        )
    if not folder.has("config.json") and folder.has(objects.ADAPTER):
        return objects.load_with_base(cls, folder, options, _load), None
    values = folder.read_json("config.json")
    if values is None and options.config is None:
        raise FileNotFoundError(
            f"{folder.label}: expected config.json, {objects.ADAPTER} or {objects.PIPELINE} in it, got none of them"
        )
    if values is not None and "_class_name" in values:
        return objects.load_diffusers_model(cls, folder, options), None
    return models.load_model(cls, folder, options)


def _is_without_weights(cls: Any) -> bool:
    """Whether a class of ``transformers`` is a tokenizer, a processor or a configuration."""
    from tensorizer.integrations._hf.models import is_of

    if not is_of("transformers", cls) or (isinstance(cls, type) and issubclass(cls, torch.nn.Module)):
        return False
    builds_models = hasattr(cls, "_from_config") or hasattr(cls, "from_config")
    return hasattr(cls, "from_pretrained") and not builds_models


def _small_files(folder: ModelFolder) -> Path:
    """A local folder with the files that hold no weights.

    Raises:
        FileNotFoundError: There are no such files.
    """
    try:
        return folder.fetch_all()
    except FileNotFoundError:  # the store cannot be listed
        names = folder.those_of(_OF_PROCESSORS)
        if not names:
            listed = ", ".join(_OF_PROCESSORS[:2])
            raise FileNotFoundError(
                f"{folder.label}: expected {listed} or the like in it, got none{folder.doubt}"
            ) from None
        return folder.fetch(*names)


def load_adapter(
    model: Any,
    source: Folder,
    *,
    adapter_name: str = "default",
    revision: Optional[str] = None,
    subfolder: str = "",
    strict: bool = True,
    verify: Any = "auto",
    encryption: Any = None,
    public_key: PublicKeyArgument = None,
    require_authenticated: Optional[bool] = None,
    cache: bool = True,
    local_files_only: bool = False,
    token: Any = None,
    allow_pickle: bool = False,
    progress: ProgressArgument = None,
    stream_options: StreamOptions = None,
) -> Any:
    """Put a PEFT adapter into a model of ``transformers`` or ``peft``, or into a pipeline of ``diffusers``.

    Args:
        model: The model or pipeline, which is changed.
        source: As for :func:`from_pretrained`: the folder of the adapter, or one with ``pytorch_lora_weights`` of a
            pipeline.
        adapter_name: Name of the adapter in the model.
        strict: Raises if tensors of the adapter are missing or unexpected, for models of ``peft``.

    All other arguments are those of :func:`from_pretrained`.

    Returns:
        `model`.

    Raises:
        TypeError: `model` is not one of these.
        LoadError, OSError, ValueError: As for :func:`from_pretrained`.

    Examples:
        >>> from tensorizer.integrations.huggingface import from_pretrained, load_adapter, save_pretrained
        >>> from peft import LoraConfig, get_peft_model
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
        >>> adapted = get_peft_model(LlamaForCausalLM(config), LoraConfig(r=2, target_modules=["q_proj"]))
        >>> save_pretrained(adapted, "adapter")
        >>> model = load_adapter(LlamaForCausalLM(config), "adapter")
    """
    from tensorizer.integrations._hf.folders import LoadOptions, open_folder
    from tensorizer.integrations._hf.objects import load_adapter_into

    progress = _shown(progress)
    call = CallOptions.to_read(encryption, stream_options, None, progress, Trust.of(public_key, require_authenticated))
    options = LoadOptions(
        revision=revision,
        cache=cache,
        local_files_only=local_files_only,
        token=token,
        call=call,
        strict=strict,
        verify=AUTO if verify == "auto" else verification(verify, call),
        allow_pickle=allow_pickle,
    )
    with open_folder(source, options) as folder:
        return load_adapter_into(model, folder.below(subfolder), options, adapter_name)
