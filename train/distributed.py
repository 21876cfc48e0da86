"""Several processes: what a launcher was asked for is what runs, or the run ends with a word before it begins.

Launchers and libraries fall back in silence: processes that believe they are alone, DeepSpeed that is ignored, sharded
training without an exchange of gradients. Here the number of processes and the strategy are compared with what was
asked for, and after the first step the weights of all processes with each other.
"""

from __future__ import annotations

import os
import socket
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import DistributedType, PartialState
from accelerate.utils import gather, gather_object
from torch import Tensor

from selfspec.errors import ConfigError, TrainingError
from selfspec.train.launched import configured_processes, number

_WORLDS = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
_WAIT = timedelta(hours=4)
"""The longest that one process works (evaluation, data) while the others wait."""
_DISK_SECONDS = 60.0


@dataclass(frozen=True)
class Processes:
    """The processes of a run.

    Args:
        state: accelerate's.
        strategy: `single`, `ddp`, `fsdp`, `zero1`, `zero2` or `zero3`.
    """

    state: PartialState
    strategy: str

    @property
    def zero_stage(self) -> int:
        """DeepSpeed's stage, 0 without DeepSpeed."""
        return int(self.strategy[4:]) if self.strategy.startswith("zero") else 0


def connect(device: str, strategy: str = "auto") -> Processes:
    """Connect the processes that a launcher started.

    Args:
        device: `cpu`, `auto`, or an accelerator.
        strategy: see `Optimisation`; `auto` is what accelerate's configuration says, else plain data parallelism.

    Raises:
        ConfigError: the strategy contradicts the launcher, or needs what is not there.
        TrainingError: processes that would train apart, or under another strategy than asked for.
    """
    world = launched_world()
    chosen = chosen_strategy(strategy, world)
    cpu = device == "cpu" or (device == "auto" and not torch.accelerator.is_available())
    if chosen.startswith("zero"):
        state = _deepspeed_state(cpu)
    else:
        state = PartialState(cpu=cpu, timeout=_WAIT) if world > 1 else PartialState(cpu=cpu)
    _demand(state, world, chosen)
    return Processes(state, chosen)


def disconnect() -> None:
    """Leave the other processes, once all have come here; the last thing a process does after its work went well.

    A process that simply ends closes its connections while threads of the others still listen on them, and those
    processes may be aborted at their own end.
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def launched_world() -> int:
    """How many processes the launcher says there are, 1 without a launcher.

    Raises:
        TrainingError: `accelerate launch` was to start several and started one.
    """
    worlds = {name: number(name) for name in _WORLDS}
    if worlds["WORLD_SIZE"] is None:
        configured = configured_processes()
        if configured > 1:
            raise TrainingError(
                f"accelerate was to start {configured} processes and started one: its CPU launcher needs mpirun. Use "
                f"`torchrun --nproc-per-node {configured} -m selfspec.train ...`"
            )
        apart = {name: size for name, size in worlds.items() if size and size > 1}
        if apart and not os.environ.get("MASTER_ADDR"):
            name, size = next(iter(apart.items()))
            raise TrainingError(
                f"{name} is {size}, but the processes have no address to meet at, so each would train alone. Start "
                "them with `torchrun -m selfspec.train` or `accelerate launch -m selfspec.train`"
            )
        return max(apart.values(), default=1)
    return worlds["WORLD_SIZE"]


def chosen_strategy(asked: str, world: int) -> str:
    """The strategy of a run, from the recipe and from accelerate's configuration.

    Raises:
        ConfigError: the two contradict each other, or one process is to share its work.
    """
    configured = _configured_strategy()
    if configured and asked not in ("auto", configured):
        raise ConfigError(
            f"optimisation.strategy is {asked}, accelerate's configuration says {configured}; leave one of them out"
        )
    chosen = configured or asked
    if chosen == "auto":
        return "ddp" if world > 1 else "single"
    if world == 1 and not chosen.startswith("zero"):
        raise ConfigError(
            f"optimisation.strategy is {chosen}, which needs several processes, and this is one; start them with "
            "`torchrun --nproc-per-node N -m selfspec.train RECIPE` or `accelerate launch -m selfspec.train RECIPE`"
        )
    return chosen


def _configured_strategy() -> str | None:
    if _flag("ACCELERATE_USE_FSDP"):
        raise ConfigError(
            "accelerate is configured for FSDP, which shards what it wraps by its own rules and trains without an "
            "exchange of gradients on some devices. Use a plain multi-process configuration, and "
            "optimisation.strategy=fsdp in the recipe"
        )
    if not configured_by_accelerate():
        return None
    if _flag("ACCELERATE_USE_CPU"):
        raise ConfigError(
            "accelerate is configured for DeepSpeed and for the CPU (use_cpu, ACCELERATE_USE_CPU), and would ignore "
            "DeepSpeed; set use_cpu: false, and device=cpu in the recipe"
        )
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if precision != "no":
        raise ConfigError(
            f"accelerate is configured for mixed_precision {precision}, in which DeepSpeed would train the head; "
            "set mixed_precision: 'no', and optimisation.precision in the recipe"
        )
    file = os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE")
    if file and file != "none":
        import json

        settings = json.loads(Path(file).read_text(encoding="utf-8"))
        stage = settings.get("zero_optimization", {}).get("stage", 0)
    else:
        stage = os.environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2")
    if str(stage) not in ("1", "2", "3"):
        raise ConfigError(f"DeepSpeed is configured for ZeRO stage {stage}, wanted 1, 2 or 3")
    return f"zero{stage}"


def configured_by_accelerate() -> bool:
    """Whether `accelerate launch` was configured for DeepSpeed.

    An Accelerator that was handed a DeepSpeed plugin leaves the first variable behind, but none of the others.
    """
    told = ("ACCELERATE_DEEPSPEED_ZERO_STAGE", "ACCELERATE_DEEPSPEED_CONFIG_FILE")
    return _flag("ACCELERATE_USE_DEEPSPEED") and any(name in os.environ for name in told)


def _flag(name: str) -> bool:
    return os.environ.get(name, "false").lower() in ("1", "true", "yes")


def _deepspeed_state(cpu: bool) -> PartialState:
    """accelerate chooses DeepSpeed by a variable, and gloo for the CPU only if told so."""
    if cpu:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        import deepspeed
    except ImportError as error:
        raise ConfigError("ZeRO needs DeepSpeed; run: pip install 'selfspec[deepspeed]'") from error
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_PORT", "29500")
    if cpu:
        # Compiled for minutes at first use, by a compiler that may not be there; gloo does what it does.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    with _variable("ACCELERATE_USE_DEEPSPEED", "true"):
        return PartialState(cpu=False, timeout=_WAIT, **({"backend": "gloo"} if cpu else {}))


@contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _demand(state: PartialState, world: int, strategy: str) -> None:
    """Raise TrainingError unless the processes are connected as asked."""
    kind = state.distributed_type
    if state.num_processes != world or (world > 1 and kind is DistributedType.NO):
        raise TrainingError(
            f"WORLD_SIZE is {world}, but accelerate sees {state.num_processes} process(es) of type {kind.value}, so "
            "they would train apart. Use `torchrun` or `accelerate launch --multi_gpu`, and connect before anything "
            "else in the program uses accelerate; on CPUs set device=cpu"
        )
    if strategy.startswith("zero") != (kind is DistributedType.DEEPSPEED):
        raise TrainingError(
            f"the strategy is {strategy}, but accelerate runs {kind.value}; start a new process, in which nothing uses "
            "accelerate before selfspec does"
        )
    if world > 1:
        ranks = sorted(gather_object([state.process_index]))
        if ranks != list(range(world)):
            raise TrainingError(f"{world} processes were started, and those that answer have the numbers {ranks}")


def deepspeed_config(stage: int) -> dict[str, Any]:
    """DeepSpeed's settings for a head: small, in float32 (bfloat16 is autocast), with torch's own AdamW.

    DeepSpeed's own optimizers are compiled at first use, which takes minutes and gains nothing on heads.
    """
    zero: dict[str, Any] = {"stage": stage, "overlap_comm": False}
    if stage == 3:
        zero |= {"stage3_gather_16bit_weights_on_model_save": True, "stage3_param_persistence_threshold": 0}
    return {
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "bf16": {"enabled": False},
    }


def shared_disk(folder: Path, state: PartialState) -> None:
    """See that all processes see what the first one writes into `folder`.

    Raises:
        TrainingError: on all of them, naming the machines that do not.
    """
    if state.num_processes == 1:
        return
    name = gather_object([f".shared-{uuid.uuid4().hex}"])[0]
    if state.is_main_process:
        (folder / name).touch()
    state.wait_for_everyone()
    limit = time.monotonic() + _DISK_SECONDS  # network file systems remember for a while that a file was not there
    while not (seen := (folder / name).is_file()) and time.monotonic() < limit:
        time.sleep(0.5)
    blind = [host for host, sees in gather_object([(socket.gethostname(), seen)]) if not sees]
    if state.is_main_process:
        (folder / name).unlink()
    if blind:
        raise TrainingError(
            f"{', '.join(sorted(set(blind)))} cannot see what the first process writes to {folder}, and would wait for "
            "data forever; give `output` and `data_folder` on a disk that all machines share"
        )


def checksum(tensors: Iterator[Tensor]) -> Tensor:
    """Two float64 numbers that change with any value."""
    sums = torch.zeros(2, dtype=torch.float64)
    for place, tensor in enumerate(tensors):
        values = tensor.detach().double()
        sums += torch.stack([values.sum(), values.abs().sum()]).cpu() * (1 + place)
    return sums


def demand_equal(sums: Tensor, device: torch.device, what: str) -> None:
    """Raise TrainingError, on all processes, unless their `sums` are the same to the last bit.

    Args:
        sums: `[2]` float64, see `checksum`.
        device: that the processes exchange tensors on.
        what: of the message.
    """
    found = gather(sums.to(device).view(1, -1))
    if not bool((found == found[0]).all()):
        raise TrainingError(
            f"after the first step the processes have different {what}: no gradients were exchanged, so each trains "
            "alone. Start them with `torchrun -m selfspec.train RECIPE`, and report this with your launch command"
        )
