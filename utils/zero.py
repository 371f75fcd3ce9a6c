"""DeepSpeed's ZeRO-2 and ZeRO-3 as these scripts train: same recipe, same checkpoints.

Weights, gradients and optimizer state are float32, and bf16 is autocast, as with DDP. DeepSpeed
takes the optimizer's step within the last backward pass of an update, clipped by its own settings;
where the gradient is not finite it leaves everything as it was, so that `Guard.check` can come
after it. Rajbhandari et al. 2020, arxiv.org/abs/1910.02054.
"""

import os
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin, convert_outputs_to_fp32
from accelerate.utils.deepspeed import DeepSpeedOptimizerWrapper
from torch import nn
from torch.distributed.distributed_c10d import _world

from utils.distributed import collective_timeout, rank, set_timeout, world_size


class ZeroAccelerator(Accelerator):
    """Accelerate's, which is told what DeepSpeed wants to know from a script in its own words."""

    def __init__(self, max_grad_norm: float, **kwargs: Any):
        plugin = DeepSpeedPlugin(gradient_accumulation_steps="auto")  # type: ignore[arg-type]
        config = plugin.deepspeed_config  # "auto": as the script says until `prepare`
        config["gradient_clipping"] = max_grad_norm  # 0 as well, which means none
        config["timers"] = {"throughput": {"enabled": False}}  # it waits for the GPU in each pass
        config["train_micro_batch_size_per_gpu"] = 1  # only printed: batches come from the script
        for low in ("bf16", "fp16"):  # the weights would be low precision too
            config[low] = {"enabled": False}
        super().__init__(deepspeed_plugin=plugin, **kwargs)

    @property
    def mixed_precision(self) -> str:
        """As the launcher says; Accelerate's would be DeepSpeed's own."""
        return os.environ.get("ACCELERATE_MIXED_PRECISION", "no")

    def prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:  # type: ignore[override]
        """The engine, and an optimizer whose state_dict is torch's."""
        groups = [dict(group) for group in optimizer.param_groups]
        if self.mixed_precision == "bf16":
            autocast = torch.autocast(self.device.type, torch.bfloat16)
            model.forward = convert_outputs_to_fp32(autocast(model.forward))
        engine, wrapped = super().prepare(model, optimizer)
        for group in list(_world.pg_map):  # DeepSpeed's own among them, with torch's 10 minutes
            set_timeout(group, collective_timeout())
        model.register_state_dict_post_hook(_name_parts)
        model.register_load_state_dict_pre_hook(_take_parts)
        model.register_load_state_dict_post_hook(partial(_refresh, wrapped.optimizer))
        return engine, ZeroOptimizer(wrapped.optimizer, groups)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        """The norm of the global gradient, 0-d, clipped already; inf where it is not finite."""
        norm = self.deepspeed_engine_wrapped.engine.get_global_grad_norm()  # type: ignore[union-attr]
        return torch.as_tensor(norm, device=self.device)


class ZeroOptimizer(DeepSpeedOptimizerWrapper):
    """DeepSpeed's optimizer with the state_dict that torch's own would have, for any engine.

    Args:
        groups: torch's, before DeepSpeed has made flat parts of their parameters.
    """

    def __init__(self, optimizer: Any, groups: list[dict[str, Any]]):
        super().__init__(optimizer)
        self.groups = groups
        self.parameters = [p for group in groups for p in group["params"]]

    @property
    def flat_parts(self) -> list[torch.Tensor]:
        """What torch's optimizer steps, a group or a piece of one each: float32, 1-d."""
        if hasattr(self.optimizer, "single_partition_of_fp32_groups"):  # ZeRO-2
            return self.optimizer.single_partition_of_fp32_groups
        return self.optimizer.fp32_partitioned_groups_flat

    def held(self) -> list[torch.Tensor]:
        """All that this process holds of the weights beside the model's own parameters.

        Of ZeRO-3 these are dropped where they are whole, and gathered again when next needed.
        """
        for p in self.parameters:
            if hasattr(p, "ds_tensor"):
                p.partition()
        shards = [p.ds_tensor for p in self.parameters if hasattr(p, "ds_tensor")]
        return [*self.flat_parts, *shards]

    def state_dict(self) -> dict[str, Any]:
        """Its moments are `ZeroPart`s: put together by `utils.sharding.whole`."""
        counts = next((s for s in self.optimizer.optimizer.state.values() if s), {})
        state = {
            index: {
                key: value.clone() if key == "step" else ZeroPart(p, self, key)
                for key, value in counts.items()
            }
            for index, p in enumerate(self.parameters if counts else [])
        }
        groups, start = [], 0
        for own, now in zip(self.groups, self.param_groups, strict=True):
            indices = list(range(start, start := start + len(own["params"])))
            groups.append({key: now[key] for key in own if key != "params"} | {"params": indices})
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Of whole tensors; ValueError when they are of other parameters."""
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})
        states = [values for _, values in sorted(state_dict["state"].items())]
        if not states:
            return
        inner, group = self.optimizer.optimizer, self.param_groups[0]
        on_device = group.get("fused") or group.get("capturable")
        for flat in self.flat_parts:
            for key, value in states[0].items():
                if key == "step":
                    value = value.to(flat.device if on_device else "cpu", copy=True)
                else:
                    value = torch.zeros_like(flat)
                inner.state[flat][key] = value
        for p, values in zip(self.parameters, states, strict=True):
            for key, value in values.items():
                if key != "step":
                    ZeroPart(p, self, key).set(value)


class ZeroPart:
    """This process's part of a parameter, or of one of its moments (`key`)."""

    def __init__(self, parameter: torch.Tensor, optimizer: ZeroOptimizer | None = None, key=""):
        self.parameter: Any = parameter
        self.optimizer, self.key = optimizer, key

    def full_tensor(self) -> torch.Tensor:
        """The whole, on its device; called by all processes."""
        p, (start, own) = self.parameter, self._held()
        if hasattr(p, "ds_tensor"):
            full = own.new_empty(world_size() * own.numel())
            dist.all_gather_into_tensor(full, own)
            return full[: p.ds_numel].view(p.ds_shape)
        if not self.key:
            return own
        full = own.new_zeros(p.numel())
        full[start : start + own.numel()] = own
        dist.all_reduce(full)
        return full.view(p.shape)

    def set(self, value: torch.Tensor) -> None:
        """Take this process's part of a whole tensor; nothing is sent."""
        start, own = self._held()
        part = value.flatten()[start : start + own.numel()]
        own.view(-1)[: len(part)].copy_(part)
        p = self.parameter
        if not self.key and hasattr(p, "ds_tensor") and p.shape == value.shape:
            p.data.copy_(value)  # small ones stay whole besides

    def _held(self) -> tuple[int, torch.Tensor]:
        """Where in the flat parameter the part begins, and the part itself."""
        p = self.parameter
        if hasattr(p, "ds_tensor"):  # ZeRO-3: equal parts of each, the last ones filled up
            from deepspeed.utils import safe_get_local_optimizer_state  # type: ignore[import-not-found]

            own = safe_get_local_optimizer_state(p, self.key) if self.key else p.ds_tensor.data
            return rank() * own.numel(), own
        if self.optimizer is None:
            return 0, p.data
        # ZeRO-2: parts of a whole group. DeepSpeed's own functions find only the first group's.
        if p._hp_mapping is None:
            return 0, p.data.new_empty(0)
        place, of_whole = p._hp_mapping.hp_fragment_address, p._hp_mapping.lp_fragment_address
        flat = self.optimizer.flat_parts[p._hp_mapping.param_group_index]
        moments = self.optimizer.optimizer.optimizer.state[flat][self.key]
        return of_whole.start, moments[place.start : place.start + place.numel]


def _name_parts(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """In the state_dict of a model, its parameters' parts."""
    for name, p in module.named_parameters(prefix=prefix.rstrip(".")):
        state[name] = ZeroPart(p)


def _take_parts(module: nn.Module, state: dict[str, Any], *args: Any) -> None:
    """Of whole weights, what this process holds; those of another shape are left for torch."""
    for name, p in module.named_parameters():
        value = state.get(name)
        if value is not None and value.shape == getattr(p, "ds_shape", p.shape):
            with torch.no_grad():
                ZeroPart(p).set(value)
            state[name] = p.data


def _refresh(optimizer: Any, module: nn.Module, incompatible: Any) -> None:
    """The optimizer's copy of the weights follows them."""
    optimizer.refresh_fp32_params()
