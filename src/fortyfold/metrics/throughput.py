"""Images a second."""

from fortyfold.spec.records import Records


def mean_images_per_second(records: Records) -> float | None:
    """All images of these records over all their time, waiting for data included; evaluation is not in it."""
    seconds = float(records["step_seconds"].sum(dtype="f8"))
    return float(records["images"].sum(dtype="i8")) / seconds if seconds > 0 else None
