"""Hosts with a real sshd each, on a network of their own (benchmarks/hosts.py), and a machine to command them from.

Each host has a home folder of its own; beside that they see the same disk, since they are one machine. The last host
has no sshd: commands are given there. Needs root, iproute2 and openssh-server.
"""

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hosts import Host, hosts

PATIENCE_SECONDS = 60.0
SSHD = "/usr/sbin/sshd"


@dataclass(frozen=True)
class SshHosts:
    members: list[Host]
    client: Host
    config: Path
    """For ssh -F."""
    folder: Path

    def home(self, number: int) -> Path:
        return self.folder / f"home-{number}"


def missing_tool() -> str | None:
    if os.geteuid() != 0:
        return "only root makes network namespaces"
    absent = [tool for tool in (SSHD, "ssh", "ssh-keygen", "ip") if shutil.which(tool) is None]
    return f"{absent[0]} is not installed (openssh-server, openssh-client, iproute2)" if absent else None


@contextmanager
def ssh_hosts(number: int, folder: Path) -> Iterator[SshHosts]:
    Path("/run/sshd").mkdir(exist_ok=True)
    folder.chmod(0o755)
    _make_key(folder / "user")
    with hosts(number + 1) as made:
        members, client = made[:number], made[number]
        for place, host in enumerate(members):
            _start_sshd(folder, place, host)
        config = _configure_client(folder, members)
        for host in members:
            _await_sshd(client, host)
        yield SshHosts(members, client, config, folder)


def _make_key(path: Path) -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)], check=True)


def _start_sshd(folder: Path, place: int, host: Host) -> None:
    key, home = folder / f"host-{place}", folder / f"home-{place}"
    home.mkdir()
    _make_key(key)
    path = f"{os.environ['PATH']}"
    lines = [
        "Port 22", f"ListenAddress {host.address}", f"HostKey {key}", f"AuthorizedKeysFile {folder}/user.pub",
        "PidFile none", "UsePAM no", "StrictModes no", "PermitRootLogin yes", "PasswordAuthentication no",
        f"SetEnv HOME={home} PATH={path}", "LogLevel ERROR",
    ]  # fmt: skip
    configuration = folder / f"sshd-{place}.conf"
    configuration.write_text("\n".join(lines) + "\n")
    with (folder / f"sshd-{place}.log").open("wb") as log:
        host.start([SSHD, "-D", "-e", "-f", str(configuration)], stdout=log, stderr=log, stdin=subprocess.DEVNULL)


def _configure_client(folder: Path, members: list[Host]) -> Path:
    known, config = folder / "known_hosts", folder / "ssh.conf"
    keys = [(folder / f"host-{place}.pub").read_text().split()[:2] for place in range(len(members))]
    known.write_text("".join(f"{host.address} {' '.join(key)}\n" for host, key in zip(members, keys, strict=True)))
    blocks = [f"Host node{place}\n  HostName {host.address}\n" for place, host in enumerate(members)]
    common = f"Host *\n  User root\n  IdentityFile {folder}/user\n  UserKnownHostsFile {known}\n  ControlPath none\n"
    config.write_text("".join(blocks) + common)
    return config


def _await_sshd(client: Host, host: Host) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    script = f"exec 3<>/dev/tcp/{host.address}/22"
    while True:
        probe = client.start(["bash", "-c", script], stderr=subprocess.DEVNULL)
        if probe.wait() == 0:
            return
        assert time.monotonic() < deadline, "sshd does not come up"
        time.sleep(0.1)
