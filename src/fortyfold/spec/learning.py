"""A recipe's [model], [optim], [loss], [precision], [ema] and [schedule]: what learns, and how."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from fortyfold.spec.section import Arguments, Count, Fraction, NonNegative, Positive, Section

_LOADING = ("pretrained", "checkpoint_path", "pretrained_cfg", "pretrained_cfg_overlay", "cache_dir")
_SETTINGS = ("lr", "weight_decay", "momentum", "accum_iter")


class Model(Section):
    name: str
    """Any model that timm knows by name. Its number of classes is the data's."""
    arguments: Arguments = Field(default_factory=dict)
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


class Optim(Section):
    name: str = "nesterov"
    """Any of timm's, or accumadam, accumadamw. sgd has plain momentum; nesterov looks ahead."""
    arguments: Arguments = Field(default_factory=dict)
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
    decay_by_name: dict[str, NonNegative] = Field(default_factory=dict)
    """Weight decay of the parameters whose name fits a pattern, such as { "head.*" = 0.01 }; the first fit holds."""
    layer_decay: Annotated[float, Field(gt=0, le=1)] | None = None
    """Each layer's learning rate is so much of the next one's, as timm groups them: for fine-tuning."""
    accum_iter: Count = 4
    """accumadam, accumadamw: the moments take in the mean gradient of so many steps."""
    clip_norm: Positive | None = None
    """Scale gradients down when their norm, over all parameters, is larger."""
    clip_value: Positive | None = None
    """Cut each gradient's entries off at plus and minus this."""

    @property
    def clips(self) -> bool:
        return self.clip_norm is not None or self.clip_value is not None

    @model_validator(mode="after")
    def _hangs_together(self) -> Self:
        if self.clip_norm is not None and self.clip_value is not None:
            raise ValueError("clip_norm and clip_value exclude each other; keep one")
        doubled = [key for key in _SETTINGS if key in self.arguments]
        if doubled:
            raise ValueError(f"{doubled[0]} stands in [optim] itself, not in its arguments")
        return self

    @model_validator(mode="after")
    def _says_nothing_idle(self) -> Self:
        accumulates = self.name.lower() in ("accumadam", "accumadamw")
        self.refuse_idle(accumulates, 'name = "accumadam" or "accumadamw"', "accum_iter")
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
        self.refuse_idle(self.name == "bce", 'name = "bce"', "bce_threshold", "bce_sum_classes")
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
    def _says_nothing_idle(self) -> Self:
        self.refuse_idle(self.dtype == "fp16", 'dtype = "fp16"', "loss_scale")
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
    def _says_nothing_idle(self) -> Self:
        self.refuse_idle(self.decay > 0, "an average (decay > 0)", "warmup")
        self.refuse_idle(self.warmup, "warmup = true", "warmup_gamma", "warmup_power")
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

    @model_validator(mode="after")
    def _says_nothing_idle(self) -> Self:
        self.refuse_idle(self.name == "step", 'name = "step"', "step_epochs", "step_factor")
        self.refuse_idle(self.name == "polynomial", 'name = "polynomial"', "power")
        self.refuse_idle(self.name == "one_cycle", 'name = "one_cycle"', "peak")
        return self
