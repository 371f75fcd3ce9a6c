"""Sharded engines: which of them a script can use, and FSDP2 as these scripts train.

An engine is chosen by the launcher's file (accelerate_configs/) alone. What would be another
training, or silently wrong, is refused before anything is read or written.
"""

import os
from datetime import timedelta
from importlib.util import find_spec
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import (
    DistributedType,
    FullyShardedDataParallelPlugin,
    get_int_from_env,
    parse_flag_from_env,
)

from utils.distributed import set_timeout
from utils.errors import UsageError

CPU_LAUNCH = "accelerate launch --config_file accelerate_configs/cpu_2.yaml SCRIPT"
GPU_LAUNCH = "accelerate launch --config_file accelerate_configs/multi_gpu.yaml SCRIPT"
FSDP_LAUNCH = "accelerate launch --config_file accelerate_configs/fsdp2.yaml SCRIPT"
ENGINES = {
    "FSDP": DistributedType.FSDP,
    "DEEPSPEED": DistributedType.DEEPSPEED,
    "MEGATRON_LM": DistributedType.MEGATRON_LM,
}


def uses_fsdp() -> bool:
    """Whether the launcher asked for it."""
    return parse_flag_from_env("ACCELERATE_USE_FSDP")


def uses_zero() -> bool:
    """Whether the launcher asked for DeepSpeed."""
    return parse_flag_from_env("ACCELERATE_USE_DEEPSPEED")


def check_engine(found: DistributedType) -> None:
    """Refuse an engine other than the one asked for."""
    for name, wanted in ENGINES.items():
        if parse_flag_from_env(f"ACCELERATE_USE_{name}") and found != wanted:
            raise UsageError(
                f"{name} was asked for, but Accelerate would run {found.value} instead; it needs "
                f"GPUs, one for each process; for plain data parallelism use `{GPU_LAUNCH}`, on a "
                f"CPU `{CPU_LAUNCH}`"
            )


def check_launched_engine(asked: int) -> None:
    """Refuse, before Accelerate is opened, an engine that cannot train as the scripts do.

    Args:
        asked: the number of processes.
    """
    if uses_zero():
        _check_zero()
    if parse_flag_from_env("ACCELERATE_USE_MEGATRON_LM"):
        raise UsageError(
            "MEGATRON_LM trains models and loops of its own, and these scripts have theirs; use "
            f"`{FSDP_LAUNCH}`"
        )
    if not parse_flag_from_env("ACCELERATE_USE_PARALLELISM_CONFIG"):
        return
    names = ("dp_replicate", "dp_shard", "tp", "cp", "sp")
    sizes = {n: get_int_from_env([f"PARALLELISM_CONFIG_{n.upper()}_SIZE"], 1) for n in names}
    odd = [name for name in ("tp", "cp", "sp") if sizes[name] > 1]
    if odd:
        raise UsageError(
            f"parallelism_config_{odd[0]}_size={sizes[odd[0]]}: several processes would share an "
            "example, and every process has its own here; use 1 (accelerate_configs/hsdp.yaml)"
        )
    replicate, shard = sizes["dp_replicate"], sizes["dp_shard"]
    if replicate * shard != asked:
        raise UsageError(
            f"parallelism_config_dp_replicate_size={replicate} x "
            f"parallelism_config_dp_shard_size={shard} are not the {asked} processes; use "
            f"--num_processes {replicate * shard}, or sizes whose product is {asked}"
        )


def _check_zero() -> None:
    """Refuse what the launcher's deepspeed_config says and the scripts would not do."""
    if os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none") != "none":
        raise UsageError(
            "deepspeed_config_file: batches, clipping and precision are said by the script's flags "
            "and by mixed_precision; leave it out, and give zero_stage (deepspeed_zero2.yaml)"
        )
    stage = get_int_from_env(["ACCELERATE_DEEPSPEED_ZERO_STAGE"], 2)
    if stage not in (2, 3):
        raise UsageError(f"zero_stage: {stage} shards no gradients; use 2 or 3, or `{GPU_LAUNCH}`")
    for name in ("offload_optimizer_device", "offload_param_device"):
        device = os.environ.get(f"ACCELERATE_DEEPSPEED_{name.upper()}", "none")
        if device != "none":
            raise UsageError(
                f"{name}: {device} takes DeepSpeed's own optimizer in place of the script's; "
                "use none, and more GPUs"
            )
    clipping = os.environ.get("ACCELERATE_GRADIENT_CLIPPING", "auto")
    if clipping != "auto":
        raise UsageError(f"gradient_clipping: {clipping} would be ignored; use --max-grad-norm")
    missing = [name for name in ("deepspeed", "transformers") if not find_spec(name)]
    if missing:  # Accelerate asks for the version of the latter
        raise UsageError(f"DeepSpeed needs {missing[0]}; pip install deepspeed transformers")


def check_sharded(precision: str, *, can_shard: bool, comm_hook: str) -> None:
    """Refuse FSDP or DeepSpeed, which run, where the script or another choice does not fit."""
    name = "DeepSpeed" if uses_zero() else "FSDP"
    if not can_shard:
        raise UsageError(
            f"{name}: this script evaluates and exports the whole model in each process; use "
            f"`{GPU_LAUNCH}` (train/language_model.py can be sharded)"
        )
    if not uses_zero() and get_int_from_env(["FSDP_VERSION"], 1) != 2:
        raise UsageError("fsdp_version: 1 cannot be continued by other engines; use 2 (fsdp2.yaml)")
    if comm_hook != "none":
        raise UsageError(f"--comm-hook {comm_hook} is DistributedDataParallel's; leave it out")
    if precision not in ("no", "bf16"):
        raise UsageError(
            f"mixed_precision={precision} with {name} has not been tried; use bf16 or no"
        )


def engine_name(accelerator: Accelerator) -> str:
    """DDP (or one process), FSDP2, HSDP, ZeRO-2 or ZeRO-3."""
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        return f"ZeRO-{accelerator.state.deepspeed_plugin.zero_stage}"  # type: ignore[union-attr]
    if accelerator.distributed_type != DistributedType.FSDP:
        return "DDP"
    sizes = accelerator.parallelism_config
    return "HSDP" if sizes is not None and sizes.dp_replicate_enabled else "FSDP2"


def set_timeouts(accelerator: Accelerator, timeout: timedelta) -> None:
    """Of HSDP's own process groups: torch's 10 minutes would end them before a hang is told."""
    sizes = accelerator.parallelism_config
    mesh: Any = accelerator.torch_device_mesh
    if sizes is not None and mesh is not None:
        for group in mesh[tuple(sizes.fsdp_dim_names)].get_all_groups():
            set_timeout(group, timeout)


def fsdp_plugin() -> FullyShardedDataParallelPlugin | None:
    """The launcher's, with losses and sums of gradients in float32; None without FSDP.

    In bf16 Accelerate would give out logits and sum gradients in bf16 too, whose 8 bits do not hold
    a sum of losses. What each sharded module returns is float32: a model that multiplies it by a
    weight of its own (a tied embedding) casts it to the weight's type.
    """
    if not uses_fsdp() or get_int_from_env(["FSDP_VERSION"], 1) != 2:
        return None
    if os.environ.get("ACCELERATE_MIXED_PRECISION") != "bf16":
        return FullyShardedDataParallelPlugin()
    from torch.distributed.fsdp import MixedPrecisionPolicy  # heavy: imported where used

    return FullyShardedDataParallelPlugin(
        mixed_precision_policy=MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32
        )
    )
