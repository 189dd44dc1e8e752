"""EC2's word that a spot instance is about to be taken away, heard on the instance and passed on as a stop.

The notice comes about two minutes before, at best. One node's is enough: it passes the stop on to the first, and all
save. Where the metadata service cannot be reached there is no notice, and training goes on without.
"""

import os
import threading
import time
import urllib.error
import urllib.request
from http import HTTPStatus
from http.client import HTTPException

from fortyfold.spec.stop import StopFlag

ENDPOINT_VARIABLE = "AWS_EC2_METADATA_SERVICE_ENDPOINT"  # as AWS's own tools have it
POLL_SECONDS = 5.0
TOKEN_SECONDS = 3600
ANSWER_SECONDS = 2.0
REASON = "spot notice"
# No proxy: the address means this very machine.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def watch_for_notice(stop: StopFlag) -> None:
    """Ask every few seconds, in a thread that dies with this process, until there is a notice."""
    endpoint = os.environ.get(ENDPOINT_VARIABLE, "http://169.254.169.254").rstrip("/")
    threading.Thread(target=_watch, args=(endpoint, stop), name="spot-notice", daemon=True).start()


def _watch(endpoint: str, stop: StopFlag) -> None:
    token, token_until = "", 0.0
    while not stop.requested:
        try:
            if time.monotonic() > token_until:
                token, token_until = _new_token(endpoint), time.monotonic() + TOKEN_SECONDS / 2
            if _has_notice(endpoint, token):
                stop.ask_by_name("SIGUSR1", REASON)
                return
        except (OSError, ValueError, HTTPException):  # the service is busy or not there, or the token was refused
            token_until = 0.0
        time.sleep(POLL_SECONDS)


def _new_token(endpoint: str) -> str:
    headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_SECONDS)}
    request = urllib.request.Request(f"{endpoint}/latest/api/token", method="PUT", headers=headers)  # noqa: S310
    with _OPENER.open(request, timeout=ANSWER_SECONDS) as answer:
        return str(answer.read().decode())


def _has_notice(endpoint: str, token: str) -> bool:
    url = f"{endpoint}/latest/meta-data/spot/instance-action"
    request = urllib.request.Request(url, headers={"X-aws-ec2-metadata-token": token})  # noqa: S310
    try:
        with _OPENER.open(request, timeout=ANSWER_SECONDS):
            return True
    except urllib.error.HTTPError as error:
        if error.code == HTTPStatus.NOT_FOUND:
            return False
        raise
