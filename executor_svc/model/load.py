"""From a model folder to a module that computes through the paged cache. Knows transformers and files, no requests.

config -> gates -> module and weights -> eager logits -> trace -> check -> rewrites -> check again
"""

import json
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import blake3
import torch
import transformers
from torch import Tensor, nn

from common.errors import ModelRefused, StartupError
from executor_svc.kernels.backend import Backend
from executor_svc.model import gates, self_check
from executor_svc.model.dtype import ModelDtype, model_dtype
from executor_svc.model.forward_context import ForwardContext, use
from executor_svc.model.layer_spec import LayerSpec
from executor_svc.model.quantize import quantize_model
from executor_svc.model.random_weights import build_random
from executor_svc.model.rotary import make_rotary_per_sequence
from executor_svc.model.temperature import switch_off_temperature
from executor_svc.model.weight_files import check_weight_files, weight_files

log = logging.getLogger(__name__)

Quantization = Literal["none", "int8"]
LoadFormat = Literal["auto", "random"]


class Rewrites(Protocol):
    """The rewrites of a kind of device: a module tree becomes faster, in place, and computes the same."""

    def __call__(self, model: nn.Module, *, quantization: Quantization = "none") -> object:
        """Rewrites; returns a report whose text is for people."""
        ...


def cpu_rewrites(model: nn.Module, *, quantization: Quantization = "none") -> object:
    """The rewrites of a CPU."""
    from executor_svc.model.rewrite import rewrite_model  # brings a compiler along, which a GPU has no use for

    return rewrite_model(model, quantization=quantization)


def no_rewrites(model: nn.Module, *, quantization: Quantization = "none") -> object:
    """Leaves the model as it is."""
    return "off"


@dataclass(frozen=True)
class LoadedModel:
    """A model that passed its self-check.

    Attributes:
        module: a transformers causal language model in eval mode, attention through the current ForwardContext.
        config: its transformers config.
        dtype: of weights (before quantisation), activations and KV cache.
        weights_digest: 32 bytes, of the weight files or of config and seed.
        max_model_len: longest sequence it serves.
        vocab_size: number of logits.
        eos_token_ids: end of text, from generation_config.json or config.json.
        layer_specs: by layer number.
        fingerprint_parts: what decides the meaning of its KV; the caller adds block size and layout.
        has_length_dependent_rope: whether ForwardContext.rope_lens matters.
        phases: seconds of each part of loading, in order.
    """

    module: nn.Module
    config: Any
    dtype: torch.dtype
    weights_digest: bytes
    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    layer_specs: tuple[LayerSpec, ...]
    fingerprint_parts: dict[str, str]
    has_length_dependent_rope: bool = False
    phases: dict[str, float] = field(default_factory=dict)

    def compute_logits(self, context: ForwardContext, input_ids: Tensor, position_ids: Tensor, sample_indices: Tensor) -> Tensor:
        """One forward pass over the packed batch.

        Args:
            context: the step's.
            input_ids: int64 [num_tokens].
            position_ids: int64 [num_tokens], in each token's own sequence.
            sample_indices: int64 [num_samples], the tokens whose logits are wanted; may be empty.

        Returns:
            float32 [num_samples, vocab_size].
        """
        return self.forward(context, input_ids, position_ids, sample_indices).float()

    def forward(self, context: ForwardContext, input_ids: Tensor, position_ids: Tensor, sample_indices: Tensor) -> Tensor:
        """As compute_logits, in the dtype in which the model computes them."""
        with use(context):
            out = self.module(
                input_ids=input_ids[None],
                position_ids=position_ids[None],
                use_cache=False,
                logits_to_keep=sample_indices,
            )
        logits: Tensor = out.logits[0]
        return logits


def load_model(
    folder: Path,
    *,
    dtype: ModelDtype = "auto",
    quantization: Quantization = "none",
    load_format: LoadFormat = "auto",
    seed: int = 0,
    backend: Backend,
    max_model_len: int | None = None,
    device: torch.device | None = None,
    rewrites: Rewrites = cpu_rewrites,
) -> LoadedModel:
    """Loads a prepared folder and checks that the model can be served.

    Args:
        folder: of prepare_model: config.json, and *.safetensors unless load_format is "random".
        dtype: see model_dtype.
        quantization: "int8" stores the weights of linear layers as int8.
        load_format: "random" ignores weight files and draws weights from the seed.
        seed: of random weights.
        backend: that will serve the model.
        max_model_len: longest sequence to serve; None: what the model allows.
        device: where the model lives; None: the CPU.
        rewrites: of that device.

    Raises:
        StartupError: files are missing or damaged, or max_model_len is more than the model's.
        ModelRefused: the model cannot be served, with the reason.
    """
    clock = _Phases()
    is_quantized = quantization == "int8"
    device = device or torch.device("cpu")
    config = _load_config(folder)
    torch_dtype = model_dtype(dtype, getattr(config.get_text_config(), "dtype", None), device.type)
    length = _model_len(config, max_model_len)
    gates.check_config(config, length)
    num_layers = int(config.get_text_config().num_hidden_layers)
    with torch.inference_mode(False), torch.no_grad():
        if load_format == "random":
            with clock.phase("random_weights"):
                module = _build_random(folder, config, torch_dtype, seed, device)
                digest = _digest_of_random(config, seed, device)
        else:
            with clock.phase("read_weights"):
                check_weight_files(folder)
                digest = _digest(folder)
                module = _from_pretrained(folder, config, torch_dtype, device)
        module.eval().requires_grad_(False)
        has_length_dependent_rope = make_rotary_per_sequence(module) > 0
        vocab_size = _vocab_size(module, config)
        with clock.phase("self_check"):
            expected = self_check.eager_logits(module, vocab_size, length)
            switch_off_temperature(module)
            specs = self_check.trace_layers(module, backend, num_layers)
            if is_quantized:  # what is left to compare after quantisation is too coarse
                self_check.check_paged(module, backend, specs, expected, torch_dtype)
        with clock.phase("rewrite"):
            report = rewrites(module, quantization=quantization)
            num_left = quantize_model(module) if is_quantized else 0
        with clock.phase("self_check_rewritten"):
            self_check.check_paged(module, backend, specs, expected, torch_dtype, is_quantized=is_quantized)
    log.info("model %s: %d layers, %s; rewrites: %s", folder.name, num_layers, clock, report)
    if num_left:
        log.info("model %s: %d modules run in 8 bits without a compiled kernel", folder.name, num_left)
    return LoadedModel(
        module=module,
        config=config,
        dtype=torch_dtype,
        weights_digest=digest,
        max_model_len=length,
        vocab_size=vocab_size,
        eos_token_ids=_eos_token_ids(folder, config),
        layer_specs=specs,
        fingerprint_parts={
            "weights": digest.hex(),
            "dtype": str(torch_dtype).removeprefix("torch."),
            "quantization": quantization,
            "rope": json.dumps(gates.rope_parameters(config.get_text_config()), sort_keys=True, default=str),
            "layers": repr(specs),
        },
        has_length_dependent_rope=has_length_dependent_rope,
        phases=clock.seconds,
    )


class _Phases:
    """Seconds by name of phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Times the with block."""
        start = time.monotonic()
        yield
        self.seconds[name] = time.monotonic() - start

    def __str__(self) -> str:
        return ", ".join(f"{name} {seconds:.2f} s" for name, seconds in self.seconds.items())


def _load_config(folder: Path) -> Any:
    if not (folder / "config.json").is_file():
        raise StartupError(f"model folder {folder} has no config.json")
    try:
        return transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        raise StartupError(
            f"{folder / 'config.json'} is no model config that transformers {transformers.__version__} knows: {error}"
        ) from error


def _model_len(config: Any, asked: int | None) -> int:
    own = int(getattr(config.get_text_config(), "max_position_embeddings", None) or gates.default_max_model_len(config))
    if asked is None:
        return gates.default_max_model_len(config)
    if not 0 < asked <= own:
        raise StartupError(f"max_model_len: {asked} is out of range 1..{own}, the model's own context")
    return asked


def _build_random(folder: Path, config: Any, dtype: torch.dtype, seed: int, device: torch.device) -> nn.Module:
    try:
        return build_random(config, dtype, seed, device)
    except Exception as error:
        raise ModelRefused(
            f"{folder / 'config.json'}: transformers cannot build a causal language model of it: {error}"
        ) from error


def _from_pretrained(folder: Path, config: Any, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """The folder's model; every weight that the model has must be in the files."""
    # With a device map, transformers copies from the mapped files straight to the device, tensor by tensor.
    placement = {} if device.type == "cpu" else {"device_map": {"": device}}
    had_bars = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()
    try:
        module, info = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            local_files_only=True,
            attn_implementation="eager",
            output_loading_info=True,
            **placement,
        )
    except Exception as error:
        raise ModelRefused(f"{folder}: transformers cannot load it as a causal language model: {error}") from error
    finally:
        if had_bars:
            transformers.utils.logging.enable_progress_bar()
    missing = sorted(info["missing_keys"])
    if missing:
        raise StartupError(f"model folder {folder} lacks {len(missing)} of the model's weights, first {missing[0]}")
    loaded: nn.Module = module
    return loaded


def _digest_of_random(config: Any, seed: int, device: torch.device) -> bytes:
    """Of everything that decides random weights: each kind of device draws its own."""
    text = json.dumps(config.to_dict(), sort_keys=True, default=str).encode() + b"%d" % seed
    return blake3.blake3(text if device.type == "cpu" else text + device.type.encode()).digest()


def _digest(folder: Path) -> bytes:
    digest = blake3.blake3(max_threads=blake3.blake3.AUTO)
    for file in weight_files(folder):
        digest.update_mmap(file)
    return digest.digest()


def _vocab_size(module: nn.Module, config: Any) -> int:
    model: Any = module
    head = model.get_output_embeddings()
    return int(head.weight.shape[0]) if head is not None else int(config.get_text_config().vocab_size)


def _eos_token_ids(folder: Path, config: Any) -> frozenset[int]:
    generation = folder / "generation_config.json"
    value = json.loads(generation.read_text()).get("eos_token_id") if generation.is_file() else None
    if value is None:
        value = getattr(config.get_text_config(), "eos_token_id", None)
    return frozenset([] if value is None else [value] if isinstance(value, int) else value)
