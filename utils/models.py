"""Models by torchvision name, and initial weights, read without executing anything."""

import difflib
import pickle
import re
from pathlib import Path
from typing import Any

import torch
import torchvision
from safetensors import SafetensorError
from safetensors.torch import load_file

from utils.console import say
from utils.distributed import on_main_process
from utils.errors import UsageError, first_line
from utils.files import read_tensors

STEP_COUNT = ".num_batches_tracked"
PREFIXES = ("_orig_mod.", "module.")  # left in keys by torch.compile and DistributedDataParallel
REPLACEABLE = 4  # tensors that may have another shape: weight and bias of the stem and of the head
CLASSIFIER_HEADS = ("fc.", "classifier.")
DETECTOR_HEAD = "head.classification_head."  # SSD has one for each of its levels


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


def load_initial_weights(model: torch.nn.Module, weights: str, model_name: str) -> None:
    """What `--weights` names, read by the main process for all; "none" leaves the model as it is.

    Errors as of read_initial_weights and load_weights.
    """
    if weights == "none":
        return
    state = on_main_process(lambda: read_initial_weights(weights, model_name))
    other_shape = load_weights(model, state, weights)
    say(f"weights   from {weights}; of another shape, kept fresh: {other_shape or 'none'}")


def load_weights(
    model: torch.nn.Module, state: dict[str, torch.Tensor], source: str
) -> tuple[str, ...]:
    """Load weights of the same architecture; returns the names left out for another shape.

    A stem for small images or a head for other classes has another shape than the file's and
    keeps its fresh weights: say so to the user. A model with a backbone also takes the weights of
    the classifier that the backbone is made of. Any other difference raises UsageError.
    """
    own = model.state_dict()
    state = _for_backbone(own, state)
    # A count of steps, which FrozenBatchNorm2d does not have: the weights fit without.
    missing = [n for n in own if n not in state and not n.endswith(STEP_COUNT)]
    unexpected = [n for n in state if n not in own and not n.endswith(STEP_COUNT)]
    if missing or unexpected:
        raise UsageError(
            f"--weights {source} is of another architecture: "
            f"missing {missing[:3] or 'nothing'}, unexpected {unexpected[:3] or 'nothing'}"
        )
    state = {**own, **{name: value for name, value in state.items() if name in own}}
    other_shape = tuple(name for name in own if own[name].shape != state[name].shape)
    not_of_head = [name for name in other_shape if not name.startswith(DETECTOR_HEAD)]
    if len(not_of_head) > REPLACEABLE or len(other_shape) == len(own):
        raise UsageError(
            f"--weights {source} is of another architecture: {len(other_shape)} of {len(own)} "
            f"tensors have another shape, such as {other_shape[0]}"
        )
    own.update({name: value for name, value in state.items() if name not in other_shape})
    model.load_state_dict(own)
    return other_shape


def _for_backbone(
    own: dict[str, torch.Tensor], state: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """A classifier's weights as those of a model on it, whose head stays fresh; else `state`.

    torchvision's segmentation models name what was features.0 or layer1 backbone.0 or
    backbone.layer1, detectors with a feature pyramid backbone.body.0 or backbone.body.layer1; a
    second head (aux_classifier) that this model lacks is left out.
    """
    if not any(name.startswith("backbone.") for name in own):
        return state
    if any(name.startswith("backbone.") for name in state):
        return {n: v for n, v in state.items() if n in own or not n.startswith("aux_classifier.")}
    trunk = "backbone.body." if any(n.startswith("backbone.body.") for n in own) else "backbone."
    body = {name: v for name, v in state.items() if not name.startswith(CLASSIFIER_HEADS)}
    renamed = {f"{trunk}{name.removeprefix('features.')}": v for name, v in body.items()}
    if any(name not in own and not name.endswith(STEP_COUNT) for name in renamed):
        return state  # of a larger one
    found = {name: value for name, value in renamed.items() if name in own}
    heads = {name: value for name, value in own.items() if not name.startswith(trunk)}
    return {**found, **heads} if found else state


def torchvision_model(
    name: str, num_classes: int, kind: str = "", **options: Any
) -> torch.nn.Module:
    """A fresh model of torchvision, by default for classification.

    Args:
        kind: of another task: segmentation, detection, video.
        options: of the model's constructor.

    UsageError with near matches when the name is unknown there.
    """
    module = getattr(torchvision.models, kind) if kind else torchvision.models
    names = torchvision.models.list_models(module=module)
    if name not in names:
        near = difflib.get_close_matches(name.lower(), names, n=3)
        near = near or (names if kind else ["resnet18"])
        of_kind = f"'s {kind} models" if kind else ""
        raise UsageError(
            f"--model {name} is not in torchvision{of_kind}; did you mean {', '.join(near)}?"
        )
    model = torchvision.models.get_model(name, num_classes=num_classes, **options)
    if getattr(model, "aux_logits", False):
        raise UsageError(f"--model {name} has several outputs in training; choose another")
    return model


def read_initial_weights(weights: str, model_name: str) -> dict[str, torch.Tensor]:
    """The state dict that `--weights` names: a file, or torchvision's own.

    Args:
        weights: "default" (of the whole model), "backbone" (of the classifier that the model is
            built on: resnet50 of fcn_resnet50 and of fasterrcnn_resnet50_fpn_v2), or a file.

    For the main process (it may download); UsageError when they cannot be had.
    """
    if weights not in ("default", "backbone"):
        return read_weights(weights)
    if weights == "backbone":
        if model_name.startswith("ssd"):
            raise UsageError(f"--weights backbone: not of {model_name}; give default, FILE or none")
        model_name = re.sub(r"(_320)?_fpn(_v2)?$", "", model_name.partition("_")[2])
    try:
        found = torchvision.models.get_model_weights(model_name)["DEFAULT"]
    except (ValueError, KeyError) as error:
        reason = f"torchvision has no weights of {model_name or 'a backbone of this model'}"
        raise UsageError(f"--weights {weights}: {reason}; give --weights FILE or none") from error
    try:
        return found.get_state_dict(
            map_location="cpu",
            check_hash=True,
            weights_only=True,  # torchvision's own default would execute what a file asks for
        )
    except Exception as error:
        broken = isinstance(error, pickle.UnpicklingError)
        reason = "the file is broken, or would run code to load" if broken else first_line(error)
        raise UsageError(
            f"--weights {weights}: torchvision's weights of {model_name} cannot be had ({reason}); "
            f"fetch {found.url} on a connected machine and give --weights FILE"
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
