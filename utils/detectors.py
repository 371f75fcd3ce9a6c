"""torchvision's detectors, made so that an image's loss depends on this image alone.

As they are, the losses of a batch are means over its sampled regions or its matched anchors, the
regions are drawn from a global generator, and images are padded to the largest of their batch: all
of it differs between layouts. `by_image` leaves weights, names and detections as torchvision has
them. In shape comments: B images, A anchors or proposals of an image.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torchvision.models.detection import FCOS, FasterRCNN, RetinaNet
from torchvision.models.detection._utils import BalancedPositiveNegativeSampler
from torchvision.models.detection.rpn import RegionProposalNetwork
from torchvision.models.detection.ssd import SSD
from torchvision.ops import FrozenBatchNorm2d, clip_boxes_to_image

from utils.errors import UsageError
from utils.models import torchvision_model
from utils.order import hash64

REGION_STREAM = 0x4E60  # of the random numbers by which regions are chosen
OWN_PLACES = 1 << 32  # from here on places are a region's own number, not an anchor's
STRIDE = 32  # image sizes are multiples of it, so that torchvision pads nothing


def region_keys(ids: Tensor, seed: int, epoch: int) -> Tensor:
    """64 random bits of each sample in an epoch, int64 (B,): the "key" of its target."""
    return hash64(ids, seed, epoch, REGION_STREAM)


class KeyedSampler(BalancedPositiveNegativeSampler):
    """torchvision's sampler of regions, with random numbers from each image's key and no others.

    Attributes:
        keys: (B,) int64, of the images of the next call: 64 random bits each.
        places: int64 of each image, what its first regions are known by, and their number if none.
        filled: share of the regions asked for that the last call has found.
    """

    def __init__(self, plain: BalancedPositiveNegativeSampler, stream: int):
        super().__init__(plain.batch_size_per_image, plain.positive_fraction)
        self.stream = stream
        self.keys = torch.empty(0, dtype=torch.int64)
        self.places: list[Tensor] = []
        self.filled = 1.0

    def __call__(self, matched_idxs: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Masks, uint8 (A,), of the positive and the negative regions of each image.

        Args:
            matched_idxs: (A,) of each image: 1 and more positive, 0 negative, -1 neither.
        """
        quota, drawn = self.batch_size_per_image, 0
        masks: tuple[list[Tensor], list[Tensor]] = ([], [])
        for i, (key, matched) in enumerate(zip(self.keys, matched_idxs, strict=True)):
            places = torch.arange(len(matched), device=matched.device) + OWN_PLACES
            if self.places:  # those behind are the true boxes, which are regions too
                places[: len(self.places[i])] = self.places[i]
            numbers = hash64(places + key, 0, 0, self.stream)
            wanted, left = int(quota * self.positive_fraction), quota
            for candidates, of_kind in zip((matched >= 1, matched == 0), masks, strict=True):
                indices = torch.where(candidates)[0]
                chosen = indices[numbers[indices].argsort(stable=True)[:wanted]]
                of_kind.append(torch.zeros_like(matched, dtype=torch.uint8))
                of_kind[-1][chosen] = 1
                left -= len(chosen)
                wanted = left
            drawn += quota - left
        self.filled = drawn / max(1, quota * len(matched_idxs))
        return masks


class _Proposals(RegionProposalNetwork):
    """In any dtype (torchvision's labels, and so its loss, are float32), and it tells the second
    stage which anchors its proposals come from: their order, by score, is a matter of rounding,
    and another order must not mean other regions."""

    second_stage: KeyedSampler

    def compute_loss(self, objectness, pred_bbox_deltas, labels, regression_targets):
        labels = [label.to(objectness.dtype) for label in labels]
        return super().compute_loss(objectness, pred_bbox_deltas, labels, regression_targets)

    def filter_proposals(self, proposals, objectness, image_shapes, num_anchors_per_level):
        found = super().filter_proposals(proposals, objectness, image_shapes, num_anchors_per_level)
        self.second_stage.places = []
        for all_, kept, shape in zip(proposals, found[0], image_shapes, strict=True):
            codes, anchors = _codes(clip_boxes_to_image(all_, shape)).sort(stable=True)
            self.second_stage.places.append(anchors[torch.searchsorted(codes, _codes(kept))])
        return found


def _codes(boxes: Tensor) -> Tensor:
    """An integer for each of the boxes (A, 4), the same for the same numbers; int64 (A,)."""
    bits = boxes.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[boxes.itemsize])
    return hash64(bits.long(), 0, 0, 0).mul(torch.arange(1, 8, 2, device=boxes.device)).sum(dim=1)


class _ByImage(nn.Module):
    """A detector that gives losses wherever it is given targets, and detections without.

    Losses are SUMS over the images. In evaluation they are those of the running statistics.
    Targets are torchvision's, with "key" (int64, 0-d): 64 random bits of the sample and epoch.
    """

    @torch.compiler.disable(recursive=False)  # as _without_compiler
    def forward(self, images: Tensor, targets: list[dict[str, Tensor]] | None = None) -> Any:
        if targets is None:
            return super().forward(images)  # type: ignore[misc]
        parts = [self, *self.children()]  # whose mode says losses or detections; no BatchNorm
        modes = [part.training for part in parts]
        for part in parts:
            part.training = True
        try:
            return self.loss_sums(images, targets)
        finally:
            for part, mode in zip(parts, modes, strict=True):
                part.training = mode

    @torch.compiler.disable(recursive=False)
    def loss_sums(self, images: Tensor, targets: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        losses = super().forward(images, targets)  # type: ignore[misc]
        return {name: loss * len(targets) for name, loss in losses.items()}


class _TwoStage(_ByImage):
    """Each stage's losses are sums over its sampled regions, divided by as many as asked for: an
    image in which it has found fewer counts by what it has."""

    @torch.compiler.disable(recursive=False)
    def loss_sums(self, images: Tensor, targets: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        rpn: Any = self.rpn.fg_bg_sampler  # type: ignore
        heads: Any = self.roi_heads.fg_bg_sampler  # type: ignore
        rpn.keys = heads.keys = torch.stack([target["key"] for target in targets])
        losses = super().loss_sums(images, targets)
        of_rpn = ("loss_objectness", "loss_rpn_box_reg")
        return {n: v * (rpn if n in of_rpn else heads).filled for n, v in losses.items()}


class _SingleStage(_ByImage):
    """Losses of each image by itself: SSD and FCOS would divide by the matches of the batch."""

    @torch.compiler.disable  # as _without_compiler
    def compute_loss(self, targets, head_outputs, anchors, *others) -> dict[str, Tensor]:
        losses = []
        for i, target in enumerate(targets):
            outputs = {name: value[i : i + 1] for name, value in head_outputs.items()}
            # SSD's matches, a tensor of each image; FCOS's anchors of each level, plain numbers.
            own = [o[i : i + 1] if isinstance(o[0], Tensor) else o for o in others]
            of_image = super().compute_loss([target], outputs, anchors[i : i + 1], *own)  # type: ignore
            losses.append(of_image)
        return {n: torch.stack([part[n] for part in losses]).mean() for n in losses[0]}


def build_detector(
    name: str, num_classes: int, image_size: int, frozen_batchnorm: bool, regions: int
) -> nn.Module:
    """A torchvision detector with fresh weights, whose losses are sums over images.

    Args:
        num_classes: of objects; the model has class 0, the background, besides.
        image_size: height and width of its inputs.
        frozen_batchnorm: the backbone's BatchNorm layers are FrozenBatchNorm2d, as torchvision has
            them with pretrained weights.
        regions: of an image that the second stage learns from; of Faster R-CNN.

    UsageError for a model that cannot be had so.
    """
    options: dict[str, Any] = {"weights_backbone": None}
    if not name.startswith("ssd"):  # the longer side of an image is scaled to it
        options |= {"min_size": image_size, "max_size": image_size}
    if name.startswith("fasterrcnn"):
        if regions < 4:
            raise UsageError(f"--regions {regions}: a quarter of them are objects; use 4 or more")
        options["box_batch_size_per_image"] = regions
    model = torchvision_model(name, num_classes + 1, "detection", **options)
    if type(model) not in (FasterRCNN, RetinaNet, FCOS, SSD):
        raise UsageError(f"--model {name} needs masks or keypoints; choose a detector of boxes")
    fixed: Any = model.transform.fixed_size  # type: ignore
    if fixed and fixed[0] != image_size:
        raise UsageError(f"--image-size {image_size}: {name} takes --image-size {fixed[0]} only")
    if not fixed and image_size % STRIDE:
        near = max(STRIDE, round(image_size / STRIDE) * STRIDE)
        raise UsageError(f"--image-size {image_size} is not a multiple of {STRIDE}; use {near}")
    heads = getattr(model, "roi_heads", nn.Module())
    if any(isinstance(layer, nn.BatchNorm2d) for layer in heads.modules()):
        raise UsageError(
            f"--model {name} has BatchNorm over regions, not images, which no --bn-group can "
            "declare; use fasterrcnn_resnet50_fpn"
        )
    if frozen_batchnorm:
        for part in ("body", "features"):  # what pretrained weights are of, in all of them
            freeze_batchnorm(getattr(model.backbone, part, nn.Module()))
    return by_image(model)


def check_export(format: str) -> None:
    """UsageError for what a detector cannot be exported as."""
    if format not in ("none", "safetensors"):
        raise UsageError(
            f"--export {format}: torch.export cannot follow a detector, whose number of boxes "
            "depends on the image; use --export safetensors, and torchvision to run it"
        )


def by_image(model: nn.Module) -> nn.Module:
    """Make a detector's losses sums over images that depend on nothing but the image, in place."""
    model.transform._skip_resize = True  # type: ignore  # it draws a random size, of one
    two_stages = isinstance(model, FasterRCNN)
    if two_stages:
        for stream, part in enumerate((model.rpn, model.roi_heads)):
            part.fg_bg_sampler = KeyedSampler(part.fg_bg_sampler, stream)  # type: ignore
        model.rpn.__class__ = _Proposals
        model.rpn.second_stage = model.roi_heads.fg_bg_sampler  # type: ignore
    for part in (model.transform, *((model.rpn, model.roi_heads) if two_stages else ())):
        part.__class__ = _without_compiler(type(part))
    kind = _TwoStage if two_stages else _SingleStage
    plain = _without_compiler(type(model), recursive=False)
    model.__class__ = type(type(model).__name__, (kind, plain), {})
    return model


def _without_compiler(kind: type, recursive: bool = True) -> Any:
    """A class whose forward pass stays out of torch.compile, which takes the backbone.

    The numbers of boxes and regions change with each image: it would compile again and again.
    """
    forward = torch.compiler.disable(kind.forward, recursive)  # type: ignore[attr-defined]
    return type(kind.__name__, (kind,), {"forward": forward})


def freeze_batchnorm(module: nn.Module) -> None:
    """Put torchvision's FrozenBatchNorm2d in the place of all BatchNorm2d below `module`."""
    for name, child in module.named_children():
        if isinstance(child, nn.BatchNorm2d):
            frozen = FrozenBatchNorm2d(child.num_features, child.eps)
            frozen.load_state_dict(child.state_dict())
            setattr(module, name, frozen)
        else:
            freeze_batchnorm(child)
