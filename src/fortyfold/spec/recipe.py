"""The recipe: what to train. Frozen, strict, and each field is documented right under it.

Only fields that something reads stand here. `spec/recipe_file.py` makes a Recipe from TOML.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Count = Annotated[int, Field(ge=1)]
Pixels = Annotated[int, Field(ge=8, le=4096)]
Fraction = Annotated[float, Field(ge=0, le=1)]
NonNegative = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
LearningRate = float | tuple[float, float]


_LOADING = ("pretrained", "checkpoint_path", "pretrained_cfg", "pretrained_cfg_overlay", "cache_dir")
_SETTINGS = ("lr", "weight_decay", "momentum", "accum_iter")


class Section(BaseModel):
    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        protected_namespaces=(),
    )


class Model(Section):
    name: str
    """Any model that timm knows by name. Its number of classes is the data's."""
    arguments: dict[str, Any] = {}
    """Further arguments for timm's create_model, such as { aa_layer = "blur" }."""
    pretrained: str | None = None
    """A .safetensors file with the first weights; `fortyfold weights convert` makes one from a .pth."""
    zero_init_last: bool | None = None
    """Start each residual block as the identity, its last scale at zero; default: timm's own choice for the model."""
    drop_rate: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Share of the classifier's inputs that are dropped in training; default: the model's own."""
    drop_path_rate: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Share of residual branches that are dropped in training, rising with the depth; default: the model's own."""
    channels_last: bool = True
    """Keep activations in NHWC memory order: faster on a CPU, and what tensor cores want."""

    @model_validator(mode="after")
    def _classes_come_from_the_data(self) -> Self:
        if "num_classes" in self.arguments:
            raise ValueError("num_classes is counted from the data's class folders; leave it out")
        loading = [key for key in _LOADING if key in self.arguments]
        if loading:
            raise ValueError(
                f"arguments.{loading[0]} would load weights by the way; name a .safetensors file in pretrained"
            )
        return self


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
    color_jitter: NonNegative | tuple[NonNegative, NonNegative, NonNegative, Annotated[float, Field(ge=0, le=0.5)]] = (
        0.0
    )
    """Brightness, contrast and saturation change by up to this share; or four numbers, the last for the hue."""
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

    @property
    def jitter(self) -> tuple[float, float, float, float]:
        """color_jitter as four numbers: brightness, contrast, saturation, hue."""
        own = self.color_jitter
        return own if isinstance(own, tuple) else (own, own, own, 0.0)

    @property
    def changes_pixels(self) -> bool:
        return self.policy != "none" or any(self.jitter) or self.erase > 0

    @property
    def mixes(self) -> bool:
        return (self.mixup > 0 or self.cutmix > 0) and self.mix_share > 0


class Optim(Section):
    name: str = "nesterov"
    """Any of timm's, or accumadam, accumadamw. sgd has plain momentum; nesterov looks ahead."""
    arguments: dict[str, Any] = {}
    """Further arguments for the optimiser, such as { betas = [0.9, 0.95] }."""
    lr: Annotated[float, Field(gt=0)]
    """Learning rate after the warm-up; a phase's own `lr` wins."""
    lr_scaling: Literal["none", "linear"] = "none"
    """linear: every learning rate is multiplied by global_batch / lr_reference_batch."""
    lr_reference_batch: Count = 256
    """The global batch for which the learning rates are written, when lr_scaling is linear."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """For those that have one; betas and the like go to arguments."""
    weight_decay: NonNegative = 0.0
    """How strongly weights are pulled to zero."""
    decay_norm_and_bias: bool = False
    """Let weight decay reach normalisation layers and biases too."""
    decay_by_name: dict[str, NonNegative] = {}
    """Weight decay of the parameters whose name fits a pattern, such as { "head.*" = 0.01 }; the first fit holds."""
    layer_decay: Annotated[float, Field(gt=0, le=1)] | None = None
    """Each layer's learning rate is so much of the next one's, as timm groups them: for fine-tuning."""
    accum_iter: Count = 4
    """accumadam, accumadamw: the moments take in the mean gradient of so many steps."""
    clip_norm: Positive | None = None
    """Scale gradients down when their norm, over all parameters, is larger."""
    clip_value: Positive | None = None
    """Cut each gradient's entries off at plus and minus this."""

    @model_validator(mode="after")
    def _hangs_together(self) -> Self:
        if self.clip_norm is not None and self.clip_value is not None:
            raise ValueError("clip_norm and clip_value exclude each other; keep one")
        doubled = [key for key in _SETTINGS if key in self.arguments]
        if doubled:
            raise ValueError(f"{doubled[0]} stands in [optim] itself, not in its arguments")
        return self


class Loss(Section):
    name: Literal["cross_entropy", "bce"] = "cross_entropy"
    """bce: each class is a yes-or-no question of its own (binary cross-entropy)."""
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the target spread evenly over all classes."""
    bce_threshold: Annotated[float, Field(ge=0, lt=1)] | None = None
    """bce: a target above this counts as a whole yes, any other as no."""
    bce_sum_classes: bool = False
    """bce: add up the classes' losses instead of taking their mean."""

    @model_validator(mode="after")
    def _says_nothing_idle(self) -> Self:
        if self.name != "bce" and (self.bce_threshold is not None or self.bce_sum_classes):
            raise ValueError('bce_threshold and bce_sum_classes are for name = "bce"')
        return self


class Precision(Section):
    dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    """What forward and backward compute in, where that is safe (autocast); weights stay fp32."""
    loss_scale: Literal["dynamic"] | Positive = "dynamic"
    """fp16: what the loss is multiplied by so that small gradients survive; dynamic finds the largest that fits."""
    tf32: bool = False
    """Let NVIDIA GPUs since Ampere round the inputs of fp32 products to 10 bits: much faster."""
    compile: bool = False
    """Compile the training step's forward and backward by torch.compile; without a compiler it goes without."""
    deterministic: bool = False
    """Only deterministic GPU kernels: a resumed run is bit for bit the same there too, but slower. (A CPU's are.)"""

    @model_validator(mode="after")
    def _scales_fp16_only(self) -> Self:
        if self.dtype != "fp16" and self.loss_scale != "dynamic":
            raise ValueError(f'loss_scale is for dtype = "fp16", and it is {self.dtype}')
        return self


class Ema(Section):
    decay: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Keep a moving average of the weights beside them, with this decay a step, such as 0.9999; 0: none."""
    warmup: bool = False
    """Let the decay rise from 0 as 1 - (1 + step / warmup_gamma) ** -warmup_power."""
    warmup_gamma: Positive = 1.0
    """Slower with a larger one."""
    warmup_power: Positive = 2 / 3
    """2/3 reaches a decay of 0.999 after 32,000 steps, 3/4 after 10,000."""

    @model_validator(mode="after")
    def _warms_something_up(self) -> Self:
        if self.warmup and not self.decay:
            raise ValueError("warmup without a decay: there is no average; give decay, such as 0.9999")
        return self


class Schedule(Section):
    name: str = "cosine"
    """constant, cosine, linear, polynomial, step or one_cycle: how the learning rate falls after the warm-up."""
    warmup_epochs: NonNegative = 0.0
    """The learning rate rises in a straight line for so many epochs."""
    warmup_start: Fraction = 0.01
    """Where the warm-up starts, as a fraction of the learning rate."""
    final: Fraction = 0.0
    """Where all but constant and step end, as a fraction of the learning rate."""
    step_epochs: Count = 30
    """step: epochs (from the start of the run) between two falls."""
    step_factor: Fraction = 0.1
    """step: what the learning rate is multiplied by at each fall."""
    power: Positive = 2.0
    """polynomial: 1 is a straight line, 2 a parabola."""
    peak: Annotated[float, Field(gt=0, lt=1)] = 0.3
    """one_cycle: the share of the run after which the learning rate is highest; it starts from warmup_start."""

    @model_validator(mode="after")
    def _rises_once(self) -> Self:
        if self.name == "one_cycle" and self.warmup_epochs > 0:
            raise ValueError("one_cycle has a rise of its own, up to peak of the run; set warmup_epochs to 0")
        return self


class Phase(Section):
    epochs: Count | tuple[int, int]
    """How many epochs, or the range [first, end): the phases must follow one another without gaps."""
    px: Pixels | None = None
    """Side of the training images; default: the recipe's."""
    global_batch: Count | None = None
    """Images a step over all ranks; default: the recipe's."""
    rank_batch: Count | None = None
    """Images a step on each rank, instead of global_batch."""
    accumulate: Count | None = None
    """Micro-batches that a rank's share of a step is cut into; default: the recipe's."""
    lr: LearningRate | None = None
    """A learning rate, or a line [from, to] over the phase's steps; wins over the schedule."""
    min_scale: Annotated[float, Field(gt=0, le=1)] | None = None
    """Smallest share of an image's area that a random crop takes; default: the recipe's."""
    data_copy: Count | Literal["original"] | None = None
    """The resized copy to read by its shorter side, or "original"; default: the smallest that suffices."""
    rectangular: bool | None = None
    """Evaluate on rectangles as well; default: the recipe's evaluate.rectangular."""

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        if self.global_batch is not None and self.rank_batch is not None:
            raise ValueError("global_batch and rank_batch exclude each other; keep one")
        if isinstance(self.epochs, tuple) and not 0 <= self.epochs[0] < self.epochs[1]:
            raise ValueError(f"the range of epochs [{self.epochs[0]}, {self.epochs[1]}) is empty")
        rates = self.lr if isinstance(self.lr, tuple) else (self.lr or 0.0,)
        if min(rates) < 0:
            raise ValueError("lr must not be negative")
        return self


class Evaluate(Section):
    every_epochs: Annotated[int, Field(ge=0)] = 1
    """Evaluate after so many epochs and at the end; 0: never, and no validation images are needed."""
    px: Pixels | None = None
    """Side of the validation images; default: the phase's training size."""
    crop_ratio: Annotated[float, Field(gt=0, le=1)] = 0.875
    """Side of the centre crop as a share of the shorter side (224 of 256: 0.875)."""
    rectangular: bool = False
    """Beside the centre crop, also evaluate in batches of like aspect ratio, each cropped to its own."""
    flip: bool = False
    """Beside the plain result, also that of the mean over each image and its mirror image."""


class Checkpoint(Section):
    every_steps: Annotated[int, Field(ge=0)] = 0
    """Save after so many steps; 0: not for that reason."""
    every_minutes: NonNegative = 10.0
    """Save when so many minutes have passed since the last save; 0: not for that reason."""
    every_epochs: Annotated[int, Field(ge=0)] = 1
    """Save after so many epochs; 0: not for that reason."""
    keep: Count = 2
    """How many of the newest checkpoints to keep."""
    best: bool = True
    """Keep the checkpoint with the best top-1 (the EMA's, where there is one) as well."""


class Log(Section):
    every_steps: Count = 50
    """Without a terminal, print a line after so many steps; sinks get the means of so many."""
    sinks: tuple[str, ...] = ()
    """Where else to report while training: csv, tensorboard, wandb. `fortyfold sink` does it afterwards, too."""
    wandb_project: str = "fortyfold"
    """wandb: the project that runs go to."""
    wandb_offline: bool = False
    """wandb: write to the run directory only; `wandb sync` sends it later."""


class Recipe(Section):
    name: Annotated[str, Field(pattern=r"^[^/.][^/]*$")] = "unnamed"
    """Names the run's default folder, runs/NAME; default: the recipe file's name."""
    epochs: Count | None = None
    """How often every image is seen; a recipe with phases gives epochs there instead."""
    px: Pixels = 224
    """Side of the training images."""
    global_batch: Count | None = None
    """Images a step, over all ranks."""
    rank_batch: Count | None = None
    """Images a step on each rank, instead of global_batch."""
    accumulate: Count = 1
    """Micro-batches that a rank's share of a step is cut into, one after another, to save memory."""
    min_scale: Annotated[float, Field(gt=0, le=1)] = 0.08
    """Smallest share of an image's area that a random crop takes."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Fixes the first weights, the order of the images and every random choice about them."""
    model: Model
    data: Data
    augment: Augment = Augment()
    optim: Optim
    loss: Loss = Loss()
    precision: Precision = Precision()
    ema: Ema = Ema()
    schedule: Schedule = Schedule()
    evaluate: Evaluate = Evaluate()
    checkpoint: Checkpoint = Checkpoint()
    log: Log = Log()
    phases: tuple[Phase, ...] = ()
    """Stretches of epochs with their own px, batch and learning rate; none: the whole run is one phase."""

    @model_validator(mode="after")
    def _hangs_together(self) -> Self:
        if self.global_batch is not None and self.rank_batch is not None:
            raise ValueError("global_batch and rank_batch exclude each other; keep one")
        lacks_batch = self.global_batch is None and self.rank_batch is None
        if lacks_batch and not (self.phases and all(p.global_batch or p.rank_batch for p in self.phases)):
            raise ValueError("give global_batch or rank_batch")
        if self.phases and self.epochs is not None:
            raise ValueError("epochs and phases exclude each other; set the epochs of each phase (phases.0.epochs)")
        if not self.phases and self.epochs is None:
            raise ValueError("give epochs, or phases")
        _check_contiguous(self.phases)
        return self

    def all_phases(self) -> tuple[Phase, ...]:
        """The phases, each with px, batch and min_scale filled in; a recipe without phases is one phase."""
        written = self.phases or (Phase(epochs=self.epochs or 1),)
        return tuple(self._filled(phase) for phase in written)

    def _filled(self, phase: Phase) -> Phase:
        own_batch = phase.global_batch or phase.rank_batch
        return phase.model_copy(
            update={
                "px": phase.px or self.px,
                "min_scale": phase.min_scale or self.min_scale,
                "accumulate": phase.accumulate or self.accumulate,
                "rectangular": self.evaluate.rectangular if phase.rectangular is None else phase.rectangular,
                "global_batch": phase.global_batch if own_batch else self.global_batch,
                "rank_batch": phase.rank_batch if own_batch else self.rank_batch,
            }
        )


FREE_KEYS = (
    "name", "data.root", "data.demo", "data.copies", "data.stage", "data.threads", "data.prefetch",
    "data.read_ahead", "checkpoint", "log",
)  # fmt: skip
"""Keys (with all below them) that change no weight: a run may go on with other values."""


def _check_contiguous(phases: tuple[Phase, ...]) -> None:
    end = 0
    for number, phase in enumerate(phases):
        first = phase.epochs[0] if isinstance(phase.epochs, tuple) else end
        if first != end:
            raise ValueError(f"phases.{number} starts at epoch {first}, but the one before ends at {end}")
        end = phase.epochs[1] if isinstance(phase.epochs, tuple) else end + phase.epochs
