"""Models by torchvision name, and initial weights, read without executing anything."""

import difflib
import pickle
from pathlib import Path

import torch
import torchvision
from safetensors import SafetensorError
from safetensors.torch import load_file

from utils.errors import UsageError, first_line
from utils.files import read_tensors

PREFIXES = ("_orig_mod.", "module.")  # left in keys by torch.compile and DistributedDataParallel
REPLACEABLE = 4  # tensors that may have another shape: weight and bias of the stem and of the head


def plain_name(name: str) -> str:
    """A parameter's name without wrappers' prefixes, in any order and at the front only."""
    while name.startswith(PREFIXES):
        name = name.split(".", 1)[1]
    return name


def read_weights(path: str | Path) -> dict[str, torch.Tensor]:
    """State dict of a .safetensors file, or of a torch file that holds tensors only.

    A torch file may hold the state dict itself or have it under "model" or "state_dict". Raises
    UsageError, naming the file, when it is missing, broken or would run code to load.
    """
    path = Path(path).expanduser()
    try:
        state = load_file(path) if path.suffix == ".safetensors" else read_tensors(path)
    except (OSError, ValueError, SafetensorError) as error:
        raise UsageError(f"--weights {path} cannot be read: {error}") from error
    for key in ("model", "state_dict"):
        if isinstance(state, dict) and isinstance(state.get(key), dict):
            state = state[key]
    if not isinstance(state, dict) or not all(
        isinstance(name, str) and torch.is_tensor(value) for name, value in state.items()
    ):
        raise UsageError(f"--weights {path} holds no state dict (names to tensors)")
    return {plain_name(name): value for name, value in state.items()}


def load_weights(
    model: torch.nn.Module, state: dict[str, torch.Tensor], source: str
) -> tuple[str, ...]:
    """Load weights of the same architecture; returns the names left out for another shape.

    A stem for small images or a head for other classes has another shape than the file's and
    keeps its fresh weights: say so to the user. Any other difference raises UsageError.
    """
    own = model.state_dict()
    missing = [name for name in own if name not in state]
    unexpected = [name for name in state if name not in own]
    if missing or unexpected:
        raise UsageError(
            f"--weights {source} is of another architecture: "
            f"missing {missing[:3] or 'nothing'}, unexpected {unexpected[:3] or 'nothing'}"
        )
    other_shape = tuple(name for name in own if own[name].shape != state[name].shape)
    if len(other_shape) > REPLACEABLE or len(other_shape) == len(own):
        raise UsageError(
            f"--weights {source} is of another architecture: {len(other_shape)} of {len(own)} "
            f"tensors have another shape, such as {other_shape[0]}"
        )
    own.update({name: value for name, value in state.items() if name not in other_shape})
    model.load_state_dict(own)
    return other_shape


def torchvision_model(name: str, num_classes: int) -> torch.nn.Module:
    """A fresh classification model of torchvision; UsageError with near matches when unknown."""
    names = torchvision.models.list_models(module=torchvision.models)
    if name not in names:
        near = difflib.get_close_matches(name.lower(), names, n=3) or ["resnet18"]
        raise UsageError(f"--model {name} is not in torchvision; did you mean {', '.join(near)}?")
    model = torchvision.models.get_model(name, num_classes=num_classes)
    if getattr(model, "aux_logits", False):
        raise UsageError(f"--model {name} has several outputs in training; choose another")
    return model


def read_initial_weights(weights: str, model_name: str) -> dict[str, torch.Tensor]:
    """The state dict that `--weights` names: a file, or torchvision's default ("default").

    For the main process (it may download); UsageError when they cannot be had.
    """
    if weights != "default":
        return read_weights(weights)
    default = torchvision.models.get_model_weights(model_name)["DEFAULT"]
    try:
        return default.get_state_dict(
            map_location="cpu",
            check_hash=True,
            weights_only=True,  # torchvision's own default would execute what a file asks for
        )
    except Exception as error:
        broken = isinstance(error, pickle.UnpicklingError)
        reason = "the file is broken, or would run code to load" if broken else first_line(error)
        raise UsageError(
            f"--weights default: torchvision's weights of {model_name} cannot be had ({reason}); "
            f"fetch {default.url} on a connected machine and give --weights FILE"
        ) from error


def check_forward(model: torch.nn.Module, example: torch.Tensor, name: str) -> None:
    """One cheap forward in evaluation mode: UsageError when the model cannot take the example."""
    modes = {module: module.training for module in model.modules()}
    try:
        with torch.no_grad():
            model.eval()(example)
    except (RuntimeError, ValueError, AssertionError) as error:  # assertions in torchvision's ViT
        shape = "x".join(map(str, example.shape[1:]))
        message = f"--model {name} cannot take {shape} inputs: {first_line(error)}"
        raise UsageError(message) from error
    finally:
        for module, mode in modes.items():  # not model.train(): frozen parts stay in evaluation
            module.training = mode
