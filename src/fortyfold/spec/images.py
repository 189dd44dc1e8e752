"""A recipe's [data] and [augment]: which images, and what is done to them."""

from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from fortyfold.spec.errors import UserError
from fortyfold.spec.section import Count, Fraction, NonNegative, Pixels, Positive, Section


class DemoData(Section):
    classes: Annotated[int, Field(ge=2, le=1000)] = 10
    """How many classes."""
    images: Annotated[int, Field(ge=12)] = 6000
    """How many images in all; one in six is for validation."""
    px: Pixels = 96
    """Side of an image."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """The same seed gives the same bytes."""


class Data(Section):
    root: str
    """Folder that holds train/ and val/ (or validation/, or Data/CLS-LOC/…), each with a folder a class, or shards."""
    demo: DemoData | None = None
    """Make the embedded data set in `root` when nothing is there."""
    stage: str | None = None
    """A folder on the node's own disk, or "$TMPDIR": the shards of root are copied there first. Changes no pixel."""
    tail: Literal["keep", "drop"] = "keep"
    """keep: every image once an epoch, batches differ in size by at most one. drop: fixed size, rest left out."""
    shuffle: Literal["global", "block"] = "global"
    """global: every order is possible. block: shards are read in long stretches, for network disks without staging."""
    copies: str | None = None
    """Folder with resized copies (160/, 352/, … of data resize); a phase reads the smallest that suffices."""
    backend: Literal["native", "dali"] = "native"
    """Who decodes: fortyfold's own decoder, or NVIDIA DALI (on the GPU, where there is one)."""
    interpolation: Literal["bilinear", "bicubic"] = "bilinear"
    """How crops are resized; both without aliasing."""
    exif_orientation: bool = False
    """Turn images upright as their EXIF data says. (torchvision and timm do not.)"""
    threads: Annotated[int, Field(ge=0)] = 0
    """Loader threads; 0: one a core beside a GPU, one for two cores on the CPU. Changes no pixel."""
    prefetch: Count = 2
    """Batches made ahead of use. Changes no pixel."""
    read_ahead: Annotated[int, Field(ge=0)] | None = None
    """Batches whose bytes are fetched early; default: 4 on a network disk, else 0. Changes no pixel."""
    flip: bool = True
    """Mirror half of the training images."""
    bad_image_budget: Fraction = 0.01
    """Share of the training images that may be unreadable (left out and counted) before the run stops."""
    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    """Mean of red, green, blue (0 to 1), subtracted on the device."""
    std: tuple[Positive, Positive, Positive] = (0.229, 0.224, 0.225)
    """Standard deviation of red, green, blue, divided by on the device."""

    @model_validator(mode="after")
    def _stages_what_is_read(self) -> Self:
        if self.stage is not None and self.copies is not None:
            raise ValueError(
                "stage copies the shards of root only; stage the copies with fortyfold data stage, "
                "name their place in copies, and leave stage out"
            )
        return self


class Augment(Section):
    policy: Literal["none", "rand", "trivial"] = "none"
    """rand: RandAugment, rand_ops changes of one strength; trivial: TrivialAugment, one of any strength."""
    rand_ops: Count = 2
    """RandAugment: how many changes an image."""
    rand_magnitude: Annotated[int, Field(ge=0, le=30)] = 9
    """RandAugment: how strong they are, of 30."""
    color_jitter: NonNegative | tuple[NonNegative, ...] = 0.0
    """Brightness, contrast and saturation change by up to this share; or four numbers, the last for hue, up to 0.5."""
    erase: Fraction = 0.0
    """Share of the images in which a random rectangle is erased."""
    erase_fill: Literal["mean", "noise"] = "noise"
    """What comes in its place: the data's mean colour, or random bytes."""
    mixup: NonNegative = 0.0
    """Blend pairs of images, by a share from Beta(mixup, mixup); 0: not."""
    cutmix: NonNegative = 0.0
    """Paste a rectangle of the pair's other image, its area from Beta(cutmix, cutmix); 0: not."""
    mix_share: Fraction = 1.0
    """How often mixup or cutmix is done at all."""
    cutmix_share: Fraction = 0.5
    """With both: how often it is cutmix."""
    mix_each: Literal["batch", "pair", "image"] = "batch"
    """What has a draw of its own: a step's whole batch, a pair, or each image."""
    mix_epochs: Annotated[int, Field(ge=0)] | None = None
    """Mix in the first so many epochs only; default: in all."""
    repeats: Count = 1
    """Repeated augmentation: an epoch takes 1/repeats of the images, each so often, cropped anew each time."""

    @field_validator("color_jitter")
    @classmethod
    def _is_one_number_or_four(cls, given: float | tuple[float, ...]) -> float | tuple[float, ...]:
        if isinstance(given, tuple) and (len(given) != 4 or given[3] > 0.5):
            numbers = ", ".join(map(str, given))
            raise ValueError(
                f"should be one number, or four (brightness, contrast, saturation, hue up to 0.5), got [{numbers}]"
            )
        return given

    @model_validator(mode="after")
    def _says_nothing_idle(self) -> Self:
        self.refuse_idle(self.policy == "rand", 'policy = "rand"', "rand_ops", "rand_magnitude")
        self.refuse_idle(self.erase > 0, "erase > 0", "erase_fill")
        self.refuse_idle(self.mixup > 0 and self.cutmix > 0, "mixup and cutmix together", "cutmix_share")
        mixes = self.mixup > 0 or self.cutmix > 0
        self.refuse_idle(mixes, "mixup or cutmix", "mix_share", "mix_each", "mix_epochs")
        self.refuse_idle(self.mix_share > 0, "mix_share > 0", "mixup", "cutmix")
        self.refuse_idle(self.mix_epochs != 0, "mix_epochs > 0", "mixup", "cutmix")
        return self

    def check_batch(self, global_batch: int) -> None:
        """Pairs to be mixed are neighbours in the batch, which shall be different images."""
        if self.mixes and self.repeats > 1 and 2 * self.repeats > global_batch:
            raise UserError(
                f"augment.repeats = {self.repeats} would mix images with themselves in a global batch of "
                f"{global_batch}; with mixup or cutmix it needs at least {2 * self.repeats}"
            )

    @property
    def jitter(self) -> tuple[float, float, float, float]:
        """color_jitter as four numbers: brightness, contrast, saturation, hue."""
        own = self.color_jitter
        brightness, contrast, saturation, hue = own if isinstance(own, tuple) else (own, own, own, 0.0)
        return brightness, contrast, saturation, hue

    @property
    def changes_pixels(self) -> bool:
        return self.policy != "none" or any(self.jitter) or self.erase > 0

    @property
    def mixes(self) -> bool:
        return self.mixup > 0 or self.cutmix > 0
