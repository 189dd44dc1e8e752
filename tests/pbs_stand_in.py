"""A stand-in for PBS: qsub, qstat, qdel, pbs_tmrsh and pbsdsh, which behave as OpenPBS was seen to.

Jobs and tasks get a bare environment (PATH=/bin:/usr/bin), the home folder and umask 077, and OMP_NUM_THREADS preset to
ncpus. The nodefile has a line a chunk; without place=scatter all chunks are on one host. pbsdsh gives 0 whatever
happened, and so does qsub -I; pbs_tmrsh gives the task's code; what tasks print comes back with neither. qdel sends
SIGTERM to the script and its tasks, and SIGKILL KILL_DELAY later; processes in sessions of their own get neither.
qstat's JSON is broken every third time. Hosts are names only; `ssh` is a stand-in, too: a shell here.

As a program (this file, under each of the names) its first link in PATH tells where the state is.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

TOOLS = ("qsub", "qstat", "qdel", "pbs_tmrsh", "pbsdsh", "ssh")
KILL_DELAY = 20.0
FINISHED = 35
BARE = {"PATH": "/bin:/usr/bin", "LANG": "C"}


def install(folder: Path, tools: tuple[str, ...] = TOOLS, walltime: str = "1:00:00") -> Path:
    """Put the commands into a folder for PATH; jobs that ask for no walltime have this one."""
    (folder / "state").mkdir(parents=True)
    (folder / "walltime").write_text(walltime)
    (folder / "home").mkdir()
    (folder / "bin").mkdir()
    for tool in tools:
        script = folder / "bin" / tool
        script.write_text(f'#!/bin/sh\nexec {sys.executable} {Path(__file__).resolve()} {folder} {tool} "$@"\n')
        script.chmod(0o755)
    return folder / "bin"


class Pbs:
    def __init__(self, folder: Path) -> None:
        self.folder, self.state = folder, folder / "state"

    def job(self, name: str) -> Path:
        return self.state / name.partition(".")[0]

    def qsub(self, arguments: list[str]) -> int:
        if arguments[0] == "-I":
            return self.interact(arguments[1:])
        script = Path(arguments[-1])
        job = self._make_job(script.read_text())
        shutil.copy(script, job / "script")
        command = [sys.executable, __file__, str(self.folder), "mom", job.name]
        log = (job / "mom.log").open("wb")
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
        print(f"{job.name}.server")
        return 0

    def interact(self, options: list[str]) -> int:
        """A shell on the first host, at the terminal that this command has. What it returns is lost."""
        if not os.isatty(0):
            print("qsub: standard input must be a terminal for an interactive job", file=sys.stderr)
            return 1
        words = zip(options[::2], options[1::2], strict=True)
        job = self._make_job("\n".join(f"#PBS {name} {value}" for name, value in words))
        print(f"qsub: waiting for job {job.name}.server to start\nqsub: job {job.name}.server ready\n", flush=True)
        environment = self._with_commands(job) | {"PBS_ENVIRONMENT": "PBS_INTERACTIVE"}
        code = self._run(["/bin/bash"], environment, job / "script.pid", stdin=None)
        (job / "ended").write_text(str(code))
        return 0

    def _make_job(self, text: str) -> Path:
        """Where the chunks that its directives ask for are."""
        job = self.state / str(len(list(self.state.iterdir())) + 1)
        job.mkdir()
        select = re.search(r"^#PBS -l select=(\S+)", text, re.MULTILINE)
        scatter = "#PBS -l place=scatter" in text
        chunks = [chunk for part in (select[1] if select else "1:ncpus=1").split("+") for chunk in self._spread(part)]
        hosts = [f"host{place if scatter else 0}" for place in range(len(chunks))]
        (job / "nodefile").write_text("".join(f"{host}\n" * 2 for host in hosts))
        walltime = re.search(r"^#PBS -l walltime=(\S+)", text, re.MULTILINE)
        granted = walltime[1] if walltime else (self.folder / "walltime").read_text()
        (job / "times").write_text(f"Resource_List.walltime = {granted}\n    stime = {time.ctime()}")
        (job / "ncpus").write_text(re.search(r"ncpus=(\d+)", chunks[0])[1])  # type: ignore[index]
        return job

    @staticmethod
    def _spread(part: str) -> list[str]:
        count, _, resources = part.partition(":")
        return [resources] * int(count)

    def environment(self, job: Path) -> dict[str, str]:
        return BARE | {
            "HOME": str(self.folder / "home"), "PBS_JOBID": f"{job.name}.server", "PBS_NODEFILE": str(job / "nodefile"),
            "OMP_NUM_THREADS": (job / "ncpus").read_text(), "PBS_ENVIRONMENT": "PBS_BATCH",
        }  # fmt: skip

    def mom(self, number: str) -> int:
        """Runs the job's script."""
        job = self.state / number
        code = self._run(["/bin/bash", str(job / "script")], self._with_commands(job), job / "script.pid")
        (job / "ended").write_text(str(code))
        return 0

    def _with_commands(self, job: Path) -> dict[str, str]:
        """PATH has them, as the profile of a real host would."""
        environment = self.environment(job)
        return environment | {"PATH": f"{self.folder / 'bin'}:{environment['PATH']}"}

    def _run(
        self, command: list[str], environment: dict[str, str], pid_file: Path, stdin: int | None = subprocess.DEVNULL
    ) -> int:
        process = subprocess.Popen(command, env=environment, cwd=self.folder / "home", umask=0o077, stdin=stdin)
        pid_file.write_text(str(process.pid))
        code = process.wait()
        pid_file.unlink(missing_ok=True)
        return code

    def task(self, command: list[str]) -> int:
        """On some host of the job that this is called in."""
        job = self.job(os.environ["PBS_JOBID"])
        nowhere = os.open(os.devnull, os.O_WRONLY)  # rather: a file of PBS's own
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        return self._run(command, self.environment(job), job / f"task-{os.getpid()}.pid")

    def pbs_tmrsh(self, arguments: list[str]) -> int:
        return self.task(arguments[1:])

    def pbsdsh(self, arguments: list[str]) -> int:
        assert arguments[0] == "-n" and arguments[2] == "--"
        self.task(arguments[3:])
        return 0

    def ssh(self, arguments: list[str]) -> int:
        """As a host would run it: a session that the job's end does not touch; its stdin closes with this process."""
        command = ["/bin/sh", "-c", arguments[-1]]
        process = subprocess.Popen(command, env=BARE, stdin=subprocess.PIPE, start_new_session=True)
        threading.Thread(target=self._close_with_ours, args=(process,), daemon=True).start()
        return process.wait()

    @staticmethod
    def _close_with_ours(process: "subprocess.Popen[bytes]") -> None:
        sys.stdin.buffer.read()
        assert process.stdin is not None
        process.stdin.close()

    def qstat(self, arguments: list[str]) -> int:
        job = self.job(arguments[-1])
        if not job.exists():
            print("qstat: Unknown Job Id", file=sys.stderr)
            return 153
        asked = len(list(job.glob("asked-*")))
        (job / f"asked-{asked}").touch()
        if asked % 3 == 2:
            print('{"Jobs": {"1.server": {"job_state": ')
            return 0
        if "json" not in arguments:
            print(f"Job Id: {job.name}.server\n    job_state = R\n    {(job / 'times').read_text()}")
            return 0
        if (job / "ended").exists():
            print(
                f"qstat: {arguments[-1]} Job has finished, use -x or -H to obtain historical job information",
                file=sys.stderr,
            )
            return FINISHED
        hosts = "+".join(f"{host}/0" for host in (job / "nodefile").read_text().split())
        print(json.dumps({"Jobs": {f"{job.name}.server": {"job_state": "R", "exec_host": hosts}}}))
        return 0

    def qdel(self, arguments: list[str]) -> int:
        job = self.job(arguments[-1])
        self._signal(job, signal.SIGTERM)
        subprocess.Popen([sys.executable, __file__, str(self.folder), "kill", job.name], start_new_session=True)
        return 0

    def kill(self, number: str) -> int:
        time.sleep(KILL_DELAY)
        self._signal(self.state / number, signal.SIGKILL)
        return 0

    @staticmethod
    def _signal(job: Path, number: int) -> None:
        for pid_file in job.glob("*.pid"):
            try:
                os.kill(int(pid_file.read_text()), number)
            except (ProcessLookupError, FileNotFoundError, ValueError):
                continue


def main() -> int:
    pbs, tool, arguments = Pbs(Path(sys.argv[1])), sys.argv[2], sys.argv[3:]
    if tool in ("mom", "kill"):
        return int(getattr(pbs, tool)(arguments[0]))
    return int(getattr(pbs, tool)(arguments))


if __name__ == "__main__":
    sys.exit(main())
