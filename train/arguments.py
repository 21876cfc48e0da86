"""A recipe's settings as transformers.Trainer takes them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState
from transformers import TrainingArguments
from transformers.integrations import get_available_reporting_integrations

from selfspec.errors import ConfigError, TrainingError
from selfspec.head import DraftHead
from selfspec.models import cpu_has
from selfspec.train.distributed import configured_by_accelerate, deepspeed_config
from selfspec.train.recipe import Optimisation
from selfspec.train.steps import Steps


def freeze(head: DraftHead) -> None:
    """Make sure that the target does not train, and is no part of what does.

    Raises:
        TrainingError: the head holds parameters of the target, or none that train.
    """
    model = head.target.model
    model.requires_grad_(False)
    model.eval()
    frozen = {id(p) for p in model.parameters()}
    shared = [name for name, p in head.named_parameters() if id(p) in frozen]
    if shared:
        raise TrainingError(
            f"the head holds parameters of the target: {shared}; borrow them as buffers that are not saved"
        )
    if not any(p.requires_grad for p in head.parameters()):
        raise TrainingError(f"the {head.kind!r} head has no parameter that trains")


def precise(settings: Optimisation, device: torch.device) -> bool:
    """Whether to compute in bfloat16 (autocast).

    `auto` asks what is faster: on CPUs that takes AMX, whose bfloat16 products train half again as fast as float32;
    with AVX-512's instructions alone the casts cost what the products gain.
    """
    if settings.precision == "auto":
        if device.type == "cpu":
            return cpu_has("amx_bf16")
        return device.type == "cuda" and torch.cuda.is_bf16_supported()
    return settings.precision == "bfloat16"


def training_arguments(
    settings: Optimisation,
    folder: Path,
    device: torch.device,
    log_every: int,
    save_every: int,
    evaluate_every: int,
    zero_stage: int = 0,
    report_to: Sequence[str] = (),
    steps: Steps | None = None,
) -> TrainingArguments:
    """Trainer's arguments for these settings; `steps` are those of the run that goes on, where one does.

    Raises:
        ConfigError: a tracker of `report_to` is not installed.
    """
    configured: dict[str, Any] = {}
    if zero_stage:
        AcceleratorState._reset_state()
        configured = {"accelerator_config": {"use_configured_state": True}}
        if not configured_by_accelerate():  # whose settings Trainer takes
            configured["deepspeed"] = deepspeed_config(zero_stage)
    args = TrainingArguments(
        **configured,
        output_dir=str(folder),
        use_cpu=device.type == "cpu",
        learning_rate=settings.lr,
        weight_decay=settings.weight_decay,
        adam_beta1=settings.betas[0],
        adam_beta2=settings.betas[1],
        max_grad_norm=settings.grad_clip,
        seed=settings.seed,
        max_steps=1,  # set when the data is known
        logging_steps=log_every,
        logging_nan_inf_filter=False,
        eval_strategy="steps" if evaluate_every else "no",
        eval_steps=evaluate_every or None,
        save_strategy="steps",
        save_steps=save_every,
        save_total_limit=2,
        label_names=["labels"],
        remove_unused_columns=False,
        dataloader_pin_memory=False,
        ddp_find_unused_parameters=False,
        report_to=trackers(report_to),
        disable_tqdm=True,
    )
    args.mixed_precision = "no"  # TrainedHead casts; accelerate's configuration must not add to it
    args.gradient_accumulation_steps = (steps or Steps.of(settings, args.world_size)).shared(args.world_size)[0]
    if args.n_gpu > 1:  # several devices are used through processes, never through DataParallel
        args._n_gpu = 1
    return args


def trackers(names: Sequence[str]) -> list[str]:
    """Those names, if transformers can report to them here.

    Raises:
        ConfigError: naming one that it cannot.
    """
    known = get_available_reporting_integrations()
    missing = sorted(set(names) - set(known))
    if missing:
        raise ConfigError(
            f"report_to: {', '.join(missing)} is unknown or not installed; installed here: {', '.join(known) or 'none'}"
        )
    return list(names) or ["none"]
