"""A recipe's [strategy]: how several ranks agree. With one rank there is nothing to agree on, and it does nothing."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from fortyfold.spec.section import Count, Positive, Section


class Strategy(Section):
    name: str = "allreduce"
    """allreduce: one gradient for all. gossip: ranks mix weights with a few others. localsgd: average now and then."""
    compress: Literal["none", "bf16", "fp16"] = "none"
    """allreduce: what gradients travel in; half the bytes of fp32."""
    sync_bn: bool = False
    """allreduce: batch normalisation over the whole global batch instead of each rank's share."""
    topology: str = "exponential"
    """gossip: who mixes with whom: complete, ring, exponential, alternating_exp_ring or matching."""
    sync_every: Count = 8
    """localsgd: ranks average their weights after so many steps."""
    together_steps: Annotated[int, Field(ge=0)] = 0
    """localsgd: in so many first steps (those of the warm-up, say) they do so after every one."""
    outer: Literal["average", "nesterov"] = "average"
    """localsgd: take the average itself, or step towards it with Nesterov's momentum (DiLoCo)."""
    outer_lr: Positive = 0.7
    """localsgd with outer = "nesterov": how far to step; 1 with no momentum would be the average."""
    outer_momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """localsgd with outer = "nesterov": its momentum."""
    bucket_mb: Positive = 25.0
    """How much travels at once, in MiB; smaller ones start earlier, larger ones cost less each."""
    bn: Literal["average", "reestimate"] = "average"
    """Statistics of normalisation layers for evaluating: the mean over the ranks, or anew on training images."""
    bn_batches: Count = 16
    """bn = "reestimate": on so many of each rank's batches."""
    local_scores: bool = False
    """gossip, localsgd: also evaluate each rank's own network, on all validation images; takes longer."""
    deadline_seconds: Annotated[float, Field(ge=1)] = 300.0
    """A rank that is not heard of, or does not get on, for so long ends the attempt. Start-up does not count."""

    @model_validator(mode="after")
    def _says_nothing_idle(self) -> Self:
        name = self.name
        self.refuse_idle(name == "allreduce", 'name = "allreduce"', "compress", "sync_bn")
        self.refuse_idle(name == "gossip", 'name = "gossip"', "topology")
        self.refuse_idle(name == "localsgd", 'name = "localsgd"', "sync_every", "together_steps", "outer")
        self.refuse_idle(self.outer == "nesterov", 'outer = "nesterov"', "outer_lr", "outer_momentum")
        self.refuse_idle(name != "localsgd", 'name = "allreduce" or "gossip"', "bucket_mb")
        self.refuse_idle(not self.sync_bn, "statistics that differ between ranks (sync_bn = false)", "bn")
        self.refuse_idle(self.bn == "reestimate", 'bn = "reestimate"', "bn_batches")
        self.refuse_idle(name != "allreduce", 'name = "gossip" or "localsgd"', "local_scores")
        return self
