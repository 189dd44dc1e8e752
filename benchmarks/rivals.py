"""What a user would take instead of our loader, each set up as its own documentation does it.

A rival is a function from a Setting to the sizes of its batches, without end; making the next batch is what is
timed. Each imports its package itself, so that a missing one is an ImportError of that rival only. Crops are
RandomResizedCrop's (sides 3:4…4:3), mirrored half of the time, or the centre 224 of a shorter side of 256. Every
one shuffles in training and reads the same images from the page cache; FFCV's are re-encoded, as its format wants.
"""

import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Any

PX, SHORTER_PX = 224, 256
RATIOS = (3 / 4, 4 / 3)
PACKED_IMAGES = 2048  # in tar shards and in FFCV's file, which are read again and again
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class Setting:
    """What every pipeline is given: `folder` holds a folder a class, `scratch` is for what it makes of it."""

    folder: Path
    scratch: Path
    threads: int
    batch: int
    min_scale: float
    validation: bool

    def paths(self, count: int) -> list[Path]:
        return sorted(self.folder.glob("*/*.jpg"))[:count]


Rival = Callable[[Setting], Iterator[int]]


def torchvision(setting: Setting) -> Iterator[int]:
    """ImageFolder, Pillow, normalised floats, DataLoader with worker processes."""
    from torch.utils.data import DataLoader
    from torchvision import datasets

    loader: Any = DataLoader(
        datasets.ImageFolder(str(setting.folder), _torchvision_transform(setting)), setting.batch,
        shuffle=not setting.validation, num_workers=setting.threads, persistent_workers=True,
        multiprocessing_context="fork",
    )  # fmt: skip
    return _endless(loader, lambda batch: len(batch[0]))


def timm(setting: Setting) -> Iterator[int]:
    """timm's loader without extra augmentation; bytes, which timm normalises on the device."""
    import torch
    from timm.data import create_dataset, create_loader

    training = not setting.validation
    loader = create_loader(
        create_dataset("", str(setting.folder), is_training=training),
        (3, PX, PX), setting.batch, is_training=training, scale=(setting.min_scale, 1.0), ratio=RATIOS,
        color_jitter=None, crop_pct=PX / SHORTER_PX, num_workers=setting.threads, device=torch.device("cpu"),
    )  # fmt: skip
    return _endless(loader.loader, lambda batch: len(batch[0]))


def webdataset(setting: Setting) -> Iterator[int]:
    """Tar shards, decoded and batched in the DataLoader's worker processes."""
    import webdataset as wds

    shards = _write_shards(setting, num_shards=4 * setting.threads)
    shuffle = 0 if setting.validation else 1000
    dataset = (
        wds.WebDataset(shards, shardshuffle=False if setting.validation else len(shards))
        .shuffle(shuffle)
        .decode("pil")
        .to_tuple("jpg", "cls")
        .map_tuple(_torchvision_transform(setting), lambda label: label)
        .batched(setting.batch)
        .repeat()
    )
    loader = wds.WebLoader(dataset, batch_size=None, num_workers=setting.threads, multiprocessing_context="fork")
    return _endless(loader, lambda batch: len(batch[0]))


def dali(setting: Setting) -> Iterator[int]:
    """NVIDIA DALI on the CPU: decode and crop fused, bytes."""
    from nvidia.dali import Pipeline, fn, types
    from nvidia.dali.plugin.pytorch import DALIClassificationIterator

    scaling = {"interp_type": types.INTERP_TRIANGULAR, "antialias": True}
    pipeline = Pipeline(setting.batch, setting.threads, device_id=None)
    with pipeline:
        blobs, labels = fn.readers.file(
            file_root=str(setting.folder), random_shuffle=not setting.validation, name="files"
        )
        if setting.validation:
            images = fn.resize(fn.decoders.image(blobs, device="cpu"), resize_shorter=SHORTER_PX, **scaling)
            images = fn.crop(images, crop=(PX, PX))
        else:
            area = [setting.min_scale, 1.0]
            images = fn.decoders.image_random_crop(
                blobs, device="cpu", random_area=area, random_aspect_ratio=list(RATIOS)
            )
            images = fn.resize(images, size=[PX, PX], **scaling)
            images = fn.flip(images, horizontal=fn.random.coin_flip())
        pipeline.set_outputs(images, labels)
    batches = DALIClassificationIterator(pipeline, reader_name="files", auto_reset=True)
    return _endless(batches, lambda batch: len(batch[0]["data"]))


def ffcv(setting: Setting) -> Iterator[int]:
    """FFCV on its own file of JPEGs (quality 90); bytes."""
    from ffcv.fields.basics import IntDecoder
    from ffcv.fields.rgb_image import CenterCropRGBImageDecoder, RandomResizedCropRGBImageDecoder
    from ffcv.loader import Loader, OrderOption
    from ffcv.transforms import RandomHorizontalFlip, ToTensor

    path, num_images = _write_ffcv(setting)
    if setting.validation:
        decoding = [CenterCropRGBImageDecoder((PX, PX), PX / SHORTER_PX), ToTensor()]
    else:
        crop = RandomResizedCropRGBImageDecoder((PX, PX), (setting.min_scale, 1.0), RATIOS)
        decoding = [crop, RandomHorizontalFlip(), ToTensor()]
    loader = Loader(
        str(path), setting.batch, num_workers=setting.threads, os_cache=True, drop_last=False,
        order=OrderOption.SEQUENTIAL if setting.validation else OrderOption.RANDOM,
        indices=[number % num_images for number in range(16 * num_images)],  # epochs as long as the others'
        pipelines={"image": decoding, "label": [IntDecoder(), ToTensor()]},
    )  # fmt: skip
    return _endless(loader, lambda batch: len(batch[0]))


RIVALS: dict[str, Rival] = {each.__name__: each for each in (torchvision, timm, webdataset, dali, ffcv)}


def _torchvision_transform(setting: Setting) -> Any:
    from torchvision import transforms

    if setting.validation:
        cropping = [transforms.Resize(SHORTER_PX), transforms.CenterCrop(PX)]
    else:
        cropping = [
            transforms.RandomResizedCrop(PX, (setting.min_scale, 1.0), RATIOS),
            transforms.RandomHorizontalFlip(),
        ]
    return transforms.Compose([*cropping, transforms.ToTensor(), transforms.Normalize(MEAN, STD)])


def _endless(loader: Any, num_images: Callable[[Any], int]) -> Iterator[int]:
    """Epoch after epoch."""
    for each in repeat(loader):
        for batch in each:
            yield num_images(batch)


def _write_shards(setting: Setting, num_shards: int) -> list[str]:
    paths = setting.paths(PACKED_IMAGES)
    shards = [setting.scratch / f"{number:04d}.tar" for number in range(num_shards)]
    for number, shard in enumerate(shards):
        with tarfile.open(shard, "w", dereference=True) as tar:
            for path in paths[number::num_shards]:
                tar.add(path, path.name)
                label = setting.scratch / "label"
                label.write_text("0")
                tar.add(label, path.with_suffix(".cls").name)
    return [str(shard) for shard in shards]


def _write_ffcv(setting: Setting) -> tuple[Path, int]:
    from ffcv.fields import IntField, RGBImageField
    from ffcv.writer import DatasetWriter
    from PIL import Image

    class Images:
        paths = setting.paths(PACKED_IMAGES)

        def __len__(self) -> int:
            return len(self.paths)

        def __getitem__(self, row: int) -> tuple[Image.Image, int]:
            return Image.open(self.paths[row]).convert("RGB"), 0

    path = setting.scratch / "images.beton"
    fields = {"image": RGBImageField(write_mode="jpg", jpeg_quality=90), "label": IntField()}
    DatasetWriter(str(path), fields, num_workers=setting.threads).from_indexed_dataset(Images())
    return path, len(Images())
