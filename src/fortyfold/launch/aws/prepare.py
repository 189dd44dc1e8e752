"""New instances by ssh: waiting until they answer, and what each gets before its agent."""

import time

from fortyfold.launch import remote
from fortyfold.launch.aws.lookup import Volume
from fortyfold.launch.aws.volumes import mount_script, runs_script
from fortyfold.launch.bootstrap import bootstrap
from fortyfold.spec.aws_site import AwsSite
from fortyfold.spec.errors import UserError

POLL_SECONDS = 3.0
BOOT_SECONDS = 600.0


def await_sshd(site: AwsSite, host: str) -> None:
    """Until it lets us in; before that it refuses, or has another host's key."""
    deadline = time.monotonic() + BOOT_SECONDS
    while True:
        try:
            remote.run(site, host, "true\n")
            return
        except UserError as error:
            if time.monotonic() > deadline:
                raise UserError(f"{error}; see user, key and identity in the site") from None
        time.sleep(POLL_SECONDS)


def prepare_host(site: AwsSite, host: str, volume: Volume | None, say: remote.Say) -> None:
    """Its data, the disk that runs are on, and fortyfold."""
    if volume is not None:
        remote.run(site, host, mount_script(site, volume))
    if site.run_disk:
        remote.run(site, host, runs_script(site, site.run_disk))
    bootstrap(site, host, say)
