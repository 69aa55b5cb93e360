"""Training with variable shapes: models, and a seeded sequence of batches whose sizes follow skewed distributions."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .models import Case, ModelAndBatch, bert, gpt2, resnet, seeded, t5
from .unets import DoubleConv

Batch = dict[str, Any]
EPOCH = 40
"""Steps after which the last, smaller batch of an epoch comes."""


@dataclass(frozen=True)
class Workload:
    """A model and its batches."""

    title: str
    case: Case
    """The model. Its own batch is not used."""
    draw: Callable[[random.Random, bool], Batch]
    """Returns a batch. It is smaller if the second argument is true."""

    def batch(self, step: int) -> Batch:
        """Return the batch of a step, the same each time."""
        return self.draw(random.Random(step), step % EPOCH == EPOCH - 1)


def skewed(chosen: random.Random, low: int, high: int) -> int:
    """Return a length: most are short, few are long, and some are cut off at `high`."""
    median = low + 0.25 * (high - low)
    return min(high, max(low, round(chosen.lognormvariate(math.log(median), 0.5))))


def tokens(chosen: random.Random, *shape: int, vocab_size: int) -> torch.Tensor:
    """Return random tokens."""
    return torch.randint(5, vocab_size, shape, generator=seeded(chosen.getrandbits(31)))


def mask_of(lengths: list[int]) -> torch.Tensor:
    """Return the attention mask of a batch that is padded to its longest sample."""
    return (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()


def fewer(batch: int, is_last: bool) -> int:
    """Return the batch size: three quarters for the last batch of an epoch."""
    return max(2, 3 * batch // 4) if is_last else batch


def language_model(layers: int, hidden: int, batch: int, low: int, high: int) -> Workload:
    """Return a GPT-2. All samples of a batch have the same length."""
    vocab_size = 1024

    def draw(chosen: random.Random, is_last: bool) -> Batch:
        ids = tokens(chosen, fewer(batch, is_last), skewed(chosen, low, high), vocab_size=vocab_size)
        return {"input_ids": ids, "labels": ids}

    title = f"GPT-2, {layers} × {hidden}, batch {batch}, length {low} to {high}"
    return Workload(title, gpt2(layers, hidden, batch, high, vocab_size), draw)


def masked_language_model(layers: int, hidden: int, batch: int, low: int, high: int) -> Workload:
    """Return a BERT. Batches are padded to their longest sample and have an attention mask."""

    def draw(chosen: random.Random, is_last: bool) -> Batch:
        mask = mask_of([skewed(chosen, low, high) for _ in range(fewer(batch, is_last))])
        ids = tokens(chosen, *mask.shape, vocab_size=2048) * mask
        hidden_tokens = (torch.rand(mask.shape, generator=seeded(chosen.getrandbits(31))) < 0.15) & mask.bool()
        labels = ids.masked_fill(~hidden_tokens, -100)
        return {"input_ids": ids.masked_fill(hidden_tokens, 4), "attention_mask": mask, "labels": labels}

    title = f"BERT, {layers} × {hidden}, batch {batch} padded to its longest sample, {low} to {high}"
    return Workload(title, bert(layers, hidden, batch, high), draw)


def translation(layers: int, hidden: int, batch: int, low: int, high: int) -> Workload:
    """Return a T5. The lengths of encoder and decoder vary, and both are padded."""

    def draw(chosen: random.Random, is_last: bool) -> Batch:
        inputs = [skewed(chosen, low, high) for _ in range(fewer(batch, is_last))]
        outputs = [max(low // 2, round(length * chosen.uniform(0.3, 0.9))) for length in inputs]
        mask, wanted = mask_of(inputs), mask_of(outputs)
        labels = tokens(chosen, *wanted.shape, vocab_size=2048).masked_fill(wanted == 0, -100)
        return {
            "input_ids": tokens(chosen, *mask.shape, vocab_size=2048) * mask, "attention_mask": mask, "labels": labels
        }  # fmt: skip

    title = f"T5, {layers} + {layers} × {hidden}, batch {batch}, encoder {low} to {high}, decoder shorter"
    return Workload(title, t5(layers, hidden, batch, high), draw)


def image_size(chosen: random.Random, low: int, high: int) -> tuple[int, int]:
    """Return height and width of an image, upright or not."""
    short = skewed(chosen, low, high)
    sides = short, min(high, round(short * chosen.uniform(1.0, 1.6)))
    return sides if chosen.random() < 0.5 else sides[::-1]


def image_classifier(stem: int, widths: list[int], depths: list[int], batch: int, low: int, high: int) -> Workload:
    """Return a ResNet. All images of a batch have the same size."""

    def draw(chosen: random.Random, is_last: bool) -> Batch:
        n_images = fewer(batch, is_last)
        size = image_size(chosen, low, high)
        pixels = torch.randn(n_images, 3, *size, generator=seeded(chosen.getrandbits(31)))
        return {"pixel_values": pixels, "labels": torch.arange(n_images) % 5}

    name = f"A ResNet of {sum(depths)} blocks with batch norm"
    return Workload(
        f"{name}, batch {batch}, height and width {low} to {high}",
        resnet(name, stem, widths, depths, batch, high),
        draw,
    )


class Detector(nn.Module):
    """Find objects in a list of images of different sizes, which are padded to a batch.

    Each pixel of the last stage predicts if it lies in a box, and where the edges of this box are.
    """

    _PADDED_TO = 32

    _BLOCKS = 3

    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, widths[0], 3, stride=2, padding=1)
        self.stages = nn.ModuleList(
            nn.Sequential(DoubleConv(a, b), *(DoubleConv(b, b) for _ in range(self._BLOCKS - 1)))
            for a, b in itertools.pairwise((widths[0], *widths))
        )
        self.stride = 2 ** len(widths)
        self.objects = nn.Conv2d(widths[-1], 1, 3, padding=1)
        self.edges = nn.Conv2d(widths[-1], 4, 3, padding=1)

    def forward(self, images: list[torch.Tensor], boxes: list[torch.Tensor]) -> torch.Tensor:
        x = self.stem(self.padded(images))
        for i, stage in enumerate(self.stages):
            x = stage(nn.functional.max_pool2d(x, 2) if i else x)
        objects, edges = self.objects(x), self.edges(x)
        losses = []
        for i, (image, own) in enumerate(zip(images, boxes, strict=True)):
            height, width = (math.ceil(side / self.stride) for side in image.shape[1:])
            losses += self.losses(objects[i, 0, :height, :width], edges[i, :, :height, :width], own)
        return torch.stack(losses).sum()

    def padded(self, images: list[torch.Tensor]) -> torch.Tensor:
        """Return a batch of the largest height and width, each rounded up."""
        height, width = (
            math.ceil(max(image.shape[axis] for image in images) / self._PADDED_TO) * self._PADDED_TO for axis in (1, 2)
        )
        batch = images[0].new_zeros(len(images), 3, height, width)
        for place, image in zip(batch, images, strict=True):
            place[:, : image.shape[1], : image.shape[2]].copy_(image)
        return batch

    def losses(self, objects: torch.Tensor, edges: torch.Tensor, boxes: torch.Tensor) -> list[torch.Tensor]:
        """Return the losses of one image. `boxes` has a row of left, top, right and bottom per object."""
        ys, xs = ((torch.arange(n) + 0.5) * self.stride for n in objects.shape)
        left, top, right, bottom = boxes[:, :, None, None].unbind(1)
        inside = (left <= xs) & (xs < right) & (top <= ys[:, None]) & (ys[:, None] < bottom)
        is_object = inside.any(0)
        found = nn.functional.binary_cross_entropy_with_logits(objects, is_object.float())
        wanted = boxes[inside.float().argmax(0)[is_object]].T / self.stride
        placed = nn.functional.l1_loss(edges[:, is_object], wanted, reduction="sum") / max(1, wanted.shape[1])
        return [found, placed]


def detection(widths: tuple[int, ...], batch: int, low: int, high: int) -> Workload:
    """Return a detector of objects in lists of images."""

    def draw(chosen: random.Random, is_last: bool) -> Batch:
        images, boxes = [], []
        for _ in range(fewer(batch, is_last)):
            height, width = image_size(chosen, low, high)
            images.append(torch.randn(3, height, width, generator=seeded(chosen.getrandbits(31))))
            corners = torch.rand(skewed(chosen, 1, 12), 2, 2, generator=seeded(chosen.getrandbits(31)))
            corners *= torch.tensor([width, height])
            boxes.append(torch.cat([corners.amin(1), corners.amax(1)], 1))
        return {"images": images, "boxes": boxes}

    def make() -> ModelAndBatch:
        return Detector(widths), {}

    title = f"Detector, {widths[0]} to {widths[-1]} wide, lists of {batch} images, height and width {low} to {high}"
    return Workload(title, Case(title, make), draw)


STANDARD: dict[str, Workload] = {
    "gpt2": language_model(6, 192, 3, 64, 512),
    "bert": masked_language_model(6, 192, 5, 32, 320),
    "t5": translation(4, 192, 5, 32, 192),
    "resnet": image_classifier(16, [64, 128, 256], [6, 4, 4], 16, 64, 192),
    "detection": detection((32, 48, 64), 4, 64, 256),
}
TINY: dict[str, Workload] = {
    "gpt2": language_model(2, 64, 4, 8, 64),
    "bert": masked_language_model(2, 64, 4, 8, 48),
    "t5": translation(2, 64, 4, 8, 48),
    "resnet": image_classifier(8, [16, 32], [2, 2], 4, 32, 64),
    "detection": detection((16, 16), 3, 32, 96),
}
