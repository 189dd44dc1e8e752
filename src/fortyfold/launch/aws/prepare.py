"""New instances by ssh: waiting until they answer, and what each gets before its agent."""

import threading
import time
from collections.abc import Callable, Sequence

from fortyfold.launch import remote
from fortyfold.launch.aws.instances import Attend
from fortyfold.launch.aws.lookup import Volume
from fortyfold.launch.aws.volumes import mount_script
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
    """Its data, and fortyfold."""
    if volume is not None:
        remote.run(site, host, mount_script(site, volume))
    bootstrap(site, host, say)


def on_all_hosts(hosts: Sequence[str], work: Callable[[str], None], attend: Attend) -> None:
    """At once, in threads that nobody waits for when `attend` raises: they end with their connections."""
    failures: list[Exception] = []

    def attempt(host: str) -> None:
        try:
            work(host)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=attempt, args=(host,), name=f"prepare-{host}", daemon=True) for host in hosts]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads) and not failures:
        attend()
        time.sleep(0.1)
    if failures:
        raise failures[0]
