"""Whether files lie on a disk that is far away."""

from pathlib import Path

_NETWORK_TYPES = ("afs", "beegfs", "ceph", "cifs", "fuse.", "gpfs", "lustre", "nfs", "panfs", "smb", "wekafs", "9p")


def is_on_network(path: Path, mounts: Path = Path("/proc/mounts")) -> bool:
    """Whether `path` lies on a network file system; where the system does not tell, it does not."""
    try:
        table = [line.split() for line in mounts.read_text(errors="surrogateescape").splitlines()]
    except OSError:
        return False
    place = path.resolve()
    above = {str(place), *map(str, place.parents)}
    kinds = {point.replace("\\040", " "): kind for _, point, kind, *_ in table}  # a later mount hides an earlier one
    deepest = max((point for point in kinds if point in above), key=len, default=None)
    return deepest is not None and kinds[deepest].startswith(_NETWORK_TYPES)
