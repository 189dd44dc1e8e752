"""Instances that are there: what moto's EC2 says is running runs, each on a host of its own (benchmarks/hosts.py).

    python aws_machines.py FOLDER OWN-ADDRESS ADDRESS=NAMESPACE …

Serves EC2 and S3. An instance gets the host key of its user data, an sshd, a home folder,
instance metadata, and the disks that are attached to it; when EC2 says that it is terminated, all its processes are
killed. FOLDER has `ready.json` (where EC2 is, and a subnet whose addresses are the hosts'), `state.json` (how all
stands), and takes a file `notice` with the number of a node that is to be taken away.
"""

import base64
import json
import os
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from aws_stand_in import ZONE, Cloud, Metadata, cloud, metadata
from hosts import kill_inside

from fortyfold.launch.aws.volumes import DEVICE
from fortyfold.spec.run_dir import write_json

SSHD = "/usr/sbin/sshd"
LOOK_SECONDS = 0.5
# Only what the hosts cannot have: disks, EFS, and somebody else's rights. Each is a folder, which mount binds.
TOOLS = {
    "sudo": 'shift; exec "$@"',
    "lsblk": 'if [ "$1" = -dnpro ] && [ -e ~/attached ]; then echo "/dev/nvme1n1 $(cat ~/attached)"; fi',
    "blkid": "exit 0",
    "mount": 'if [ "$2" = nfs4 ]; then exec /usr/bin/mount --bind "$DISKS/efs" "$6"; fi\n'
    '/usr/bin/mount --bind "$DISKS/$(cat ~/attached)" "$4" && /usr/bin/mount -o remount,bind,ro "$4"',
}


class Machines:
    def __init__(self, ec2: Cloud, folder: Path, address: str, namespaces: dict[str, str]) -> None:
        self.ec2, self.folder, self.address, self.namespaces = ec2, folder, address, namespaces
        self.stack = ExitStack()
        self.running: dict[str, tuple[str, Metadata]] = {}
        """By id: the namespace, and its metadata."""
        (folder / "tools").mkdir()
        for name, body in TOOLS.items():
            tool = folder / "tools" / name
            tool.write_text(f"#!/bin/bash\n{body}\n")
            tool.chmod(0o755)

    def look(self) -> None:
        found = self.ec2.instances()
        for instance in found:
            name, state = instance["InstanceId"], instance["State"]["Name"]
            if state == "running" and name not in self.running:
                self._boot(instance)
            if state == "terminated" and name in self.running:
                kill_inside(self.running.pop(name)[0])
        self._attach()
        self._give_notice(found)
        states = [each["State"]["Name"] for each in found]
        left = {"groups": len(self.ec2.groups()), "volumes": self.ec2.volume_states()}
        write_json(self.folder / "state.json", {"instances": states, **left})

    def _boot(self, instance: dict[str, Any]) -> None:
        """cloud-init's part, and sshd."""
        name, address = instance["InstanceId"], instance["PrivateIpAddress"]
        answer = self.ec2.ec2.describe_instance_attribute(InstanceId=name, Attribute="userData")
        data = base64.b64decode(answer["UserData"]["Value"]).decode().removeprefix("#cloud-config\n")
        key, home = self.folder / f"key-{name}", self._home(name)
        home.mkdir()
        key.write_text(json.loads(data)["ssh_keys"]["ed25519_private"])
        key.chmod(0o600)
        notices = self.stack.enter_context(metadata(self.address))
        variables = {
            "HOME": home, "PATH": f"{self.folder}/tools:{os.environ['PATH']}", "DISKS": self.folder / "disks",
            "AWS_EC2_METADATA_SERVICE_ENDPOINT": notices.url, "AWS_ENDPOINT_URL_S3": self.ec2.url,
        }  # fmt: skip
        lines = [
            "Port 22", f"ListenAddress {address}", f"HostKey {key}", f"AuthorizedKeysFile {self.folder}/user.pub",
            "PidFile none", "UsePAM no", "StrictModes no", "PermitRootLogin yes", "PasswordAuthentication no",
            f"SetEnv {' '.join(f'{name}={value}' for name, value in variables.items())}", "LogLevel ERROR",
        ]  # fmt: skip
        configuration = self.folder / f"sshd-{name}.conf"
        configuration.write_text("\n".join(lines) + "\n")
        namespace = self.namespaces[address]
        command = ["ip", "netns", "exec", namespace, SSHD, "-D", "-e", "-f", str(configuration)]
        subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
        self.running[name] = (namespace, notices)

    def _home(self, name: str) -> Path:
        return self.folder / f"home-{name}"

    def _attach(self) -> None:
        for volume in self.ec2.ec2.describe_volumes()["Volumes"]:
            for attachment in volume["Attachments"]:
                if attachment["Device"] == DEVICE and attachment["InstanceId"] in self.running:
                    serial = volume["VolumeId"].replace("-", "")
                    (self._home(attachment["InstanceId"]) / "attached").write_text(serial)

    def _give_notice(self, found: list[dict[str, Any]]) -> None:
        wanted = self.folder / "notice"
        if wanted.exists():
            node = int(wanted.read_text())
            wanted.unlink()
            for instance in found:
                if instance["AmiLaunchIndex"] == node and instance["InstanceId"] in self.running:
                    self.running[instance["InstanceId"]][1].notice.set()


def main(folder: Path, address: str, namespaces: dict[str, str]) -> None:
    with cloud(address) as ec2:
        ec2.reset()
        ec2.s3.create_bucket(Bucket="my-bucket")
        ec2.iam.create_instance_profile(InstanceProfileName="writes-there")
        network = ec2.ec2.create_vpc(CidrBlock="10.0.0.0/16")["Vpc"]["VpcId"]
        subnet = ec2.ec2.create_subnet(VpcId=network, CidrBlock="10.0.0.0/24", AvailabilityZone=ZONE)["Subnet"]
        disks = ec2.make_volumes(*(f"imagenet_{node}" for node in range(4)))
        machines = Machines(ec2, folder, address, namespaces)
        ready = {"url": ec2.url, "subnet": subnet["SubnetId"], "disks": [disk.replace("-", "") for disk in disks]}
        write_json(folder / "ready.json", ready)
        while True:
            machines.look()
            time.sleep(LOOK_SECONDS)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], dict(pair.split("=") for pair in sys.argv[3:]))
