"""EC2 and S3 as moto plays them, on a port of this machine, and instance metadata as a few lines do."""

import json
import logging
import os
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import boto3

_CREDENTIALS = "/latest/meta-data/iam/security-credentials/"
REGION, ZONE = "us-east-1", "us-east-1b"
SITE = {
    "kind": "aws", "region": REGION, "instance_type": "p3.16xlarge", "ami": "training-*", "key": "mine",
    "ssh_from": "203.0.113.7", "nodes": 4, "spot": True,
}  # fmt: skip


class Cloud:
    """What there is, for assertions; and what was there before, for the code under test."""

    def __init__(self, url: str) -> None:
        self.url, self.image = url, ""
        anybody = {"aws_access_key_id": "id", "aws_secret_access_key": "word"}
        self.ec2, self.s3, self.iam = (
            boto3.client(service, endpoint_url=url, region_name=REGION, **anybody) for service in ("ec2", "s3", "iam")
        )

    def reset(self) -> None:
        request = urllib.request.Request(f"{self.url}/moto-api/reset", method="POST")  # noqa: S310
        urllib.request.urlopen(request, timeout=10).close()  # noqa: S310
        self.ec2.create_key_pair(KeyName="mine")
        self.image = self.ec2.register_image(Name="training-2026", RootDeviceName="/dev/sda1")["ImageId"]

    def make_volumes(self, *names: str, zone: str = ZONE) -> list[str]:
        def tagged(name: str) -> list[dict[str, Any]]:
            return [{"ResourceType": "volume", "Tags": [{"Key": "Name", "Value": name}]}]

        make = self.ec2.create_volume
        return [
            make(AvailabilityZone=zone, Size=10, VolumeType="gp3", TagSpecifications=tagged(name))["VolumeId"]
            for name in names
        ]

    def instances(self, *states: str) -> list[dict[str, Any]]:
        found = [each for one in self.ec2.describe_instances()["Reservations"] for each in one["Instances"]]
        return [each for each in found if not states or each["State"]["Name"] in states]

    def groups(self) -> list[dict[str, Any]]:
        return [
            each for each in self.ec2.describe_security_groups()["SecurityGroups"] if each["GroupName"] != "default"
        ]

    def network(self) -> str:
        return str(self.ec2.describe_vpcs()["Vpcs"][0]["VpcId"])

    def volume_states(self) -> list[str]:
        return [each["State"] for each in self.ec2.describe_volumes()["Volumes"]]

    def left(self) -> list[Any]:
        """What still costs, or would be in the way."""
        return [*self.instances("pending", "running", "stopping", "stopped"), *self.groups()]


@contextmanager
def cloud(address: str = "127.0.0.1") -> Iterator[Cloud]:
    os.environ["MOTO_EC2_LOAD_DEFAULT_AMIS"] = "false"  # a thousand images, made again at each reset
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address=address, port=0, verbose=False)
    server.start()
    _, port = server.get_host_and_port()
    try:
        yield Cloud(f"http://{address}:{port}")
    finally:
        server.stop()


class Metadata(ThreadingHTTPServer):
    """IMDSv2: a token by PUT, without which nothing is said; a notice once `notice` is set; anybody's credentials."""

    def __init__(self, address: str = "127.0.0.1") -> None:
        super().__init__((address, 0), _Answers)
        self.notice = threading.Event()
        self.asked: list[tuple[str, str]] = []
        self.tokens = ["first"]
        """Those that are good; a new one is the last."""

    @property
    def url(self) -> str:
        return f"http://{self.server_address[0]!s}:{self.server_address[1]}"


class _Answers(BaseHTTPRequestHandler):
    server: Metadata

    def do_PUT(self) -> None:
        self.server.asked.append(("PUT", self.path))
        fine = self.path == "/latest/api/token" and self.headers["X-aws-ec2-metadata-token-ttl-seconds"].isdecimal()
        self._answer(200 if fine else 400, self.server.tokens[-1])

    def do_GET(self) -> None:
        self.server.asked.append(("GET", self.path))
        if self.headers["X-aws-ec2-metadata-token"] not in self.server.tokens:
            self._answer(401, "")
        elif self.path == "/latest/meta-data/spot/instance-action" and self.server.notice.is_set():
            self._answer(200, '{"action": "terminate", "time": "2030-01-01T00:00:00Z"}')
        elif self.path == _CREDENTIALS:
            self._answer(200, "a-profile")
        elif self.path == f"{_CREDENTIALS}a-profile":
            given = {"AccessKeyId": "id", "SecretAccessKey": "hush-hush", "Token": "hush-hush"}
            self._answer(200, json.dumps({"Code": "Success", "Expiration": "2099-01-01T00:00:00Z", **given}))
        else:
            self._answer(404, "")

    def _answer(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *arguments: object) -> None:
        pass


@contextmanager
def metadata(address: str = "127.0.0.1") -> Iterator[Metadata]:
    with Metadata(address) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
