"""Tensors of which each process holds a part (DTensors, DeepSpeed's): put together, parted again.

Plain tensors pass as they are, so nobody has to ask which engine runs.
"""

from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from utils.distributed import rank


def is_sharded(tree: Any) -> bool:
    """Whether a tensor in these nested lists and dicts is a part of one."""
    return any(hasattr(value, "full_tensor") for value in tree_leaves(tree))


def own_part(value: Any) -> Any:
    """Of a sharded tensor, what this process holds."""
    if hasattr(value, "ds_tensor"):  # ZeRO-3: equal parts, the last ones filled up
        size = value.ds_tensor.numel()
        return value.ds_tensor[: max(0, value.ds_numel - rank() * size)]
    return value.to_local() if hasattr(value, "to_local") else value


def numel(tensor: torch.Tensor) -> int:
    """Of the whole tensor."""
    return getattr(tensor, "ds_numel", tensor.numel())


def put_together(value: Any) -> Any:
    """The whole of a sharded tensor, on its device; called by all processes."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def whole(tree: Any, keep: bool = True) -> Any:
    """`tree` with its sharded tensors put together, on the CPU; called by all processes.

    One tensor at a time is whole on the device. Without `keep`, None stands in their place: that
    process only takes part.
    """

    def gather(value: Any) -> Any:
        if not is_sharded(value):
            return value
        full = put_together(value)
        return full.cpu() if keep else None

    return tree_map(gather, tree) if is_sharded(tree) else tree


def parted_weights(weights: dict[str, Any], model: torch.nn.Module) -> dict[str, Any]:
    """A whole state dict, in this process's parts where those of `model` are parts."""
    own = model.state_dict()
    if not is_sharded(own):
        return weights
    return {name: _parted_like(value, own.get(name)) for name, value in weights.items()}


def parted_moments(moments: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """An optimizer's whole state dict, laid out as its parameters are; numbers as they are."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if not is_sharded(parameters):
        return moments
    state = {
        index: {
            key: _parted_like(value, parameters[index])
            if getattr(value, "shape", None) == parameters[index].shape
            else value
            for key, value in values.items()
        }
        for index, values in moments["state"].items()
    }
    return {**moments, "state": state}


def _parted_like(value: torch.Tensor, like: Any) -> torch.Tensor:
    """This process's part of the whole `value`, as `like` is parted; nothing is sent."""
    if not hasattr(like, "placements"):  # of DeepSpeed the model's own hooks take their part
        return value
    from torch.distributed.tensor import distribute_tensor  # heavy: imported where used

    # A copy, so that the file that `value` lies in may go.
    mesh, placements = like.device_mesh, like.placements
    return distribute_tensor(value, mesh, placements, src_data_rank=None).clone()
