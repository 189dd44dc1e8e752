"""The host key of a run's instances: made here and given to them, so that ssh knows them from the first word on.

It is in the instances' user data, and in no file once they are asked for: whoever can read user data could pass for
these instances, as long as they live, and for nothing else.
"""

import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fortyfold.spec.aws_site import AwsSite
from fortyfold.spec.errors import UserError
from fortyfold.spec.run_dir import RunDir, write_atomically

ALIAS = "fortyfold-instance"
CONNECT_SECONDS = 10


@dataclass(frozen=True)
class HostKey:
    private: str = field(repr=False)
    public: str


def make_host_key() -> HostKey:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "key")
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "fortyfold", "-f", str(path)], check=True)
        return HostKey(path.read_text(), path.with_suffix(".pub").read_text().strip())


def host_names(num_nodes: int) -> tuple[str, ...]:
    """What ssh is told; the configuration says where that is."""
    return tuple(f"node{node}" for node in range(num_nodes))


def write_ssh_config(run_dir: RunDir, site: AwsSite, addresses: Sequence[str], key: HostKey) -> Path:
    """How ssh reaches the instances; what it says not is taken from the user's own configuration."""
    run_dir.launch.mkdir(parents=True, exist_ok=True)
    write_atomically(run_dir.known_hosts, f"{ALIAS} {key.public}\n".encode())
    write_atomically(run_dir.ssh_config, render_ssh_config(run_dir.known_hosts, site, addresses).encode())
    return run_dir.ssh_config


def render_ssh_config(known_hosts: Path, site: AwsSite, addresses: Sequence[str]) -> str:
    lines = [
        line
        for name, address in zip(host_names(len(addresses)), addresses, strict=True)
        for line in (f"Host {name}", f"    HostName {address}")
    ]
    lines += [
        "Host *",
        f"    User {site.user}",
        f"    HostKeyAlias {ALIAS}",
        f"    UserKnownHostsFile {_quote(_literal(str(known_hosts)))}",
        f"    ConnectTimeout {CONNECT_SECONDS}",
        *([f"    IdentityFile {_quote(_literal(site.identity))}"] if site.identity else []),
        f"    Include {_quote(site.config or '~/.ssh/config')}",
    ]
    return "\n".join(lines) + "\n"


def _literal(path: str) -> str:
    """% begins a token there."""
    return path.replace("%", "%%")


def _quote(path: str) -> str:
    if '"' in path or not path.isprintable():
        raise UserError(f"ssh cannot be told of the path {path!r}; choose one without quotes and line breaks")
    return f'"{path}"'
